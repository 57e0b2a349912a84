"""Trial of an advantage estimator of the user on random responses before a run (`validate --loss`)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ppoctl.algorithms.formulas.estimator import Estimator, EstimatorInputs
from ppoctl.algorithms.stages.loss_on_batch import COLUMNS, PADDING, random_mask, same
from ppoctl.core.errors import PpoctlError
from ppoctl.core.finding import Finding, ok, problem

PROMPTS = 4


def try_estimator(estimator: Estimator, *, samples: int, has_values: bool) -> tuple[Finding, ...]:
    """Return the checks of an estimator, for `samples` responses to each prompt. The first check that cannot be made
    ends the trial."""
    checks = []
    try:
        for check in _checks(estimator, random_step(samples, has_values=has_values)):
            checks.append(check)
    except PpoctlError as error:
        checks.append(problem(error.message, kind="loss"))
    return tuple(checks)


def _checks(estimator: Estimator, inputs: EstimatorInputs) -> Iterator[Finding]:
    first = estimator(inputs)
    metrics = "".join(f"; metric `{name}`" for name in first.metrics)
    yield ok(f"advantages are finite numbers of shape {[*inputs.mask.shape]}{metrics}", kind="loss")

    def compare(other: EstimatorInputs, good: str, wrong: str, rows: Tensor | None = None) -> Finding:
        found = estimator(other)
        pairs = [(first.advantages, found.advantages), (first.returns, found.returns)]
        is_same = all(
            same(one if rows is None else one[rows], two[:, :COLUMNS])
            for one, two in pairs
            if one is not None and two is not None
        )
        return ok(good, kind="loss") if is_same else problem(wrong, kind="loss")

    yield compare(inputs, "a second call returns the same", "a second call returns other numbers")
    yield compare(
        _padded(inputs),
        "padding changes no advantage",
        f"{PADDING} columns of padding change the advantages: they depend on the width of the grid",
    )
    if inputs.values is not None:
        other = replace(inputs, values=torch.where(inputs.mask, inputs.values, -3.0))
        yield compare(other, "masked-out values change no advantage", "masked-out values change the advantages")
    order = _other_order(inputs.groups)
    yield compare(
        _reordered(inputs, order),
        "the order of the responses changes no advantage",
        "the advantages depend on the order of the prompts, or of the responses to a prompt",
        order,
    )


def random_step(samples: int, *, has_values: bool) -> EstimatorInputs:
    """Return the same random inputs in every call: responses to `PROMPTS` prompts, one of them without a score."""
    generator, rows = torch.Generator().manual_seed(2), PROMPTS * samples
    mask, valid = random_mask(max(rows, 3), generator)[:rows], torch.ones(rows, dtype=torch.bool)
    valid[2] = False
    scores = torch.randint(0, 5, (rows,), generator=generator) / 4 * valid
    last = (mask * torch.arange(1, COLUMNS + 1)).argmax(dim=1)
    at_end = torch.zeros(rows, COLUMNS).scatter(1, last[:, None], scores[:, None])
    groups = torch.arange(rows) // samples
    values = torch.randn(rows, COLUMNS, generator=generator) * mask
    return EstimatorInputs(
        token_rewards=at_end * mask,
        values=values if has_values else None,
        mask=mask,
        scores=scores,
        valid=valid,
        groups=groups,
        prompt_ids=[f"train/{group}" for group in groups.tolist()],
        lengths=mask.sum(dim=1),
        truths=[str(group) for group in groups.tolist()],
        extras=_Extras(torch.rand(rows, generator=generator).tolist()),
    )


class _Extras(dict[str, list[float]]):
    """Metrics of a scorer: a metric of any name has these values."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def __missing__(self, name: str) -> list[float]:
        return self.numbers


def _other_order(groups: Tensor) -> Tensor:
    """Return the rows with the prompts in reverse order, and the responses to each prompt too."""
    return torch.arange(len(groups)).flip(0)


def _reordered(inputs: EstimatorInputs, order: Tensor) -> EstimatorInputs:
    def listed(values: object) -> list[object]:
        return [values[row] for row in order.tolist()]  # type: ignore[index]

    tensors: dict[str, Any] = {
        name: value[order] for name, value in vars(inputs).items() if isinstance(value, Tensor)
    }
    groups = inputs.groups.max() - tensors["groups"]  # indices are by first occurrence
    lists: dict[str, Any] = {name: listed(getattr(inputs, name)) for name in ("prompt_ids", "truths")}
    extras = _Extras([inputs.extras[""][row] or 0.0 for row in order.tolist()])
    return replace(inputs, **{**tensors, **lists, "groups": groups, "extras": extras})


def _padded(inputs: EstimatorInputs) -> EstimatorInputs:
    grids = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor) and value.ndim == 2}
    padded: dict[str, Any] = {name: torch.nn.functional.pad(grid, (0, PADDING)) for name, grid in grids.items()}
    return replace(inputs, **padded)
