"""The labels of a reward model: the names of the outputs of its head."""

from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, RecipeError, quoted
from ppoctl.models.folder import read_config

_HEADS = ("ForSequenceClassification", "ForTokenClassification")


def has_head(folder: Path) -> bool:
    """Whether config.json names a class with its own head. If so, a checkpoint without a head is incomplete."""
    return any(str(name).endswith(_HEADS) for name in read_config(folder).get("architectures") or ())


def labels_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the head's outputs, in order. Raises EnvironmentProblemError if config.json names no class
    with a head, or if its labels do not map consecutive numbers to names."""
    config = read_config(folder)
    if not has_head(folder):
        kinds = ", ".join(map(str, config.get("architectures") or ())) or "no class"
        raise EnvironmentProblemError(
            f"`{folder}` is not a reward model: its config.json names {kinds}, not a ...ForSequenceClassification",
            hint=f"grep -A1 architectures {quoted(folder / 'config.json')}",
        )
    named = config.get("id2label")
    if named is None:
        # transformers omits its default, two labels.
        return tuple(f"LABEL_{number}" for number in range(_count(config.get("num_labels", 2), folder)))
    try:
        by_number = {int(number): str(name) for number, name in named.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise _wrong(f"id2label = {named}", folder) from error
    if not by_number or sorted(by_number) != list(range(len(by_number))):
        raise _wrong(f"id2label = {named}", folder)
    return tuple(by_number[number] for number in range(len(by_number)))


def label_number(folder: Path, label: str | None, key: str = "reward") -> int | None:
    """Return the number of the label whose probability is the score; None: the head has one output, which is the
    score. Raises RecipeError if the head has several labels and `label` is None, or if it has no such label. `key` is
    the key of the model's table."""
    labels = labels_of(folder)
    listed = ", ".join(f"`{name}`" for name in labels)
    if label is None and len(labels) > 1:
        raise RecipeError(
            f"the reward model in `{folder}` has {len(labels)} labels ({listed}), but `label` names none of them",
            hint=f"--set {key}.label={quoted(labels[-1])}",
        )
    if label is None:
        return None
    if label not in labels:
        raise RecipeError(
            f"`label` is `{label}`; the reward model in `{folder}` has {listed}",
            hint=f"--set {key}.label={quoted(labels[-1])}",
        )
    return None if len(labels) == 1 else labels.index(label)


def _count(written: Any, folder: Path) -> int:
    if not isinstance(written, int) or isinstance(written, bool) or written < 1:
        raise _wrong(f"num_labels = {written}", folder)
    return written


def _wrong(field: str, folder: Path) -> EnvironmentProblemError:
    return EnvironmentProblemError(f"config.json of `{folder}`: `{field}` does not define labels")
