"""`ppoctl preview`: rows as a model receives them, with notes on the set of rows.

The module imports no torch. It imports transformers only if the model has no `tokenizer.json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.batch.prompts import Json, Message, Prompt
from ppoctl.core.errors import EnvironmentProblemError, RecipeError
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.index import Counted, read_set
from ppoctl.data.prompt_set import PromptSet
from ppoctl.data.rows import single_tables, tables_of
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import decode, is_known, light_tokenizer, load_tokenizer
from ppoctl.models.end_tokens import end_token_ids
from ppoctl.models.folder import model_folder
from ppoctl.recipe.schema import Recipe

_MEASURED = 10_000
"""Maximum number of prompts of a set whose lengths are measured. These prompts are evenly spaced over the set."""
_ANSWER = "Forty-two"


@dataclass(frozen=True)
class Token:
    """One token of a prompt, or a stop token."""

    id: int
    text: str


@dataclass(frozen=True)
class PreviewedRow:
    """One row as the generator receives it."""

    id: str
    text: str
    tokens: tuple[Token, ...]
    mask: tuple[bool, ...]
    """For each token, whether the token is trained on; False for every token of a prompt."""
    is_cut: bool
    truth: str | None
    fields: dict[str, Json]


@dataclass(frozen=True)
class Preview:
    """Preview of a set of rows."""

    counts: dict[str, dict[str, int]]
    """Key of a table -> numbers of its rows."""
    rows: tuple[PreviewedRow, ...]
    stops: tuple[Token, ...]
    """Tokens that end a response."""
    stop_strings: tuple[str, ...]
    lengths: dict[str, int]
    """Prompt lengths in tokens: minimum, quantiles, maximum."""
    measured: int
    """Number of prompts whose lengths were measured."""
    flags: tuple[str, ...]
    """Notes on properties of the rows that a user should check."""


def preview(recipe: Recipe, set_name: str, rows: int, counted: Counted | None = None) -> Preview:
    """Return a preview of one set of rows: `train`, or the name of an evaluation set.

    `rows` is the number of rows of each source. Raises RecipeError if the recipe has no such set,
    EnvironmentProblemError if the model is not on this machine, and the errors of reading the rows.
    """
    tables = tables_of(recipe.data)
    name = set_name if set_name in tables else f"eval.{set_name}"
    if name not in tables:
        sets = ", ".join(f"`{each.removeprefix('eval.')}`" for each in tables)
        raise RecipeError(f"the recipe has no set `{set_name}`; it has {sets}", hint="--set-name train")
    folder = model_folder(recipe.model.path)
    template = ChatTemplate.of_folder(folder)
    tokenizer: Any = light_tokenizer(folder) or load_tokenizer(recipe.model.path)
    most = recipe.rollout.max_prompt_tokens
    renderer, environment = PromptTemplate(tokenizer, template), recipe.environment_of(name)
    prompt_sets = [
        PromptSet(read_set(single, name=its, source=source, counted=counted), single, renderer, most, environment)
        for source, (its, single) in single_tables(tables[name], name=name).items()
    ]
    prompts = [prompt for each in prompt_sets for prompt in _evenly(each, _MEASURED // len(prompt_sets))]
    lengths = sorted(len(prompt.token_ids) for prompt in prompts)
    stops = _stops(folder, recipe)
    return Preview(
        counts={f"data.{each.rows.name}": each.counts.as_dict() for each in prompt_sets},
        rows=tuple(_row(each, prompt, tokenizer, most) for each in prompt_sets for prompt in each[:rows]),
        stops=tuple(Token(id, _text_of(tokenizer, id)) for id in stops),
        stop_strings=recipe.rollout.stop_strings,
        lengths={word: lengths[round(quantile * (len(lengths) - 1))] for word, quantile in _QUANTILES.items()},
        measured=len(prompts),
        flags=tuple(_flags(prompt_sets, template, tokenizer, stops)),
    )


_QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _evenly(prompts: PromptSet, most: int) -> Sequence[Prompt]:
    return prompts[:: max(1, -(-len(prompts) // max(most, 1)))]


def _row(prompts: PromptSet, prompt: Prompt, tokenizer: Any, most: int) -> PreviewedRow:
    tokens = tuple(Token(id, _text_of(tokenizer, id)) for id in prompt.token_ids)
    is_cut = bool(prompts.counts.cut) and len(tokens) >= most
    return PreviewedRow(
        prompt.id, prompt.text, tokens, (False,) * len(tokens), is_cut, prompt.answer, dict(prompt.fields)
    )


def _text_of(tokenizer: Any, id: int) -> str:
    return decode(tokenizer, [id]) if is_known(tokenizer, id) else "(no such token)"


def _stops(folder: Path, recipe: Recipe) -> tuple[int, ...]:
    """Return the token ids that end a response: first the ids of the model, then the ids of the recipe."""
    try:
        own = end_token_ids(folder)
    except EnvironmentProblemError:  # `_flags` reports the error
        own = ()
    return tuple(dict.fromkeys((*own, *recipe.rollout.stop_token_ids)))


def _flags(sets: Sequence[PromptSet], template: ChatTemplate, tokenizer: Any, stops: tuple[int, ...]) -> list[str]:
    found = []
    if template.text is None:
        found.append("the model has no chat template: prompts are plain text")
    elif (end := _end_of_turn(sets[0][0].messages, template, tokenizer)) is not None and end not in stops:
        shown = _text_of(tokenizer, end)
        found.append(
            f"no end token: the template ends a turn with `{shown}` ({end}), which does not end a response; a model "
            "trained to emit this token does not stop there, and generates until `rollout.max_new_tokens`"
        )
    if template.reads_clock:
        found.append(
            "the template reads the clock: these prompts have the current time, a run has that of its creation"
        )
    if not stops:
        found.append("no end token: the model has none (`eos_token_id`), so responses end at their limit")
    for each in sets:
        found += each.rows.remarks()
        if remarks := each.counts.remarks():
            found.append(f"`data.{each.rows.name}`: {remarks}")
    return found


def _end_of_turn(chat: Sequence[Message], template: ChatTemplate, tokenizer: Any) -> int | None:
    """Return the token that the template writes after an answer of the assistant.

    None means that the template writes no token there, or rejects a chat with an answer.
    """
    try:
        text = template.render((*chat, Message("assistant", _ANSWER), Message("user", "Why?")))
    except Exception:  # noqa: BLE001 - a template is code: it can fail in any way
        return None
    rest = text.rpartition(_ANSWER)[2].lstrip()
    ids = tokenizer([rest], add_special_tokens=False, verbose=False)["input_ids"][0] if rest else []
    return ids[0] if ids else None
