"""The output for one sample: prompt, response or conversation, score, and the values of each token."""

import json as json_module
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from ppoctl.cli import render
from ppoctl.core.errors import RecipeError
from ppoctl.core.units import counted

if TYPE_CHECKING:
    from ppoctl.show.report.episode_parts import EpisodePart
    from ppoctl.show.report.shown_sample import ShownSample
    from ppoctl.store.sample_query import Source
    from ppoctl.store.stored_samples import SampleRow

TokenMetric = Literal["advantage", "value", "kl"]
LEGENDS: dict[TokenMetric, str] = {
    "advantage": "green: advantage above 0, red: below",
    "value": "green: value above the response's mean, red: below",
    "kl": "green: likelier than under the reference, red: less likely",
}


def show(source: "Source", step: int, row: int, by: TokenMetric, *, as_json: bool) -> None:
    """Print a sample of a step, or of an evaluation. Raises RecipeError if there is no such sample."""
    from ppoctl.show.report.shown_sample import read_samples, require_row

    if not source.evaluations:
        [sample] = read_samples(source.run, step, [row])
        if as_json:
            render.json(sample.as_dict())
        else:
            print_sample(sample, by)
        return
    from ppoctl.store.stored_samples import evaluation_rows, listed

    rows = evaluation_rows(source.run, step)
    require_row(row, len(rows))
    if as_json:
        render.json({"step": step, "row": row, **rows[row]})
    else:
        print_evaluated(listed(step, rows)[row], rows[row])


def print_sample(found: "ShownSample", by: TokenMetric = "advantage") -> None:
    """Print a sample of a step with its tokens. Raises RecipeError if the metric that colours them is missing."""
    weights = _weights(found, by)
    place = f"{found.row} of step {found.step}: {found.prompt_id} #{found.sample}, {found.stamp}"
    _print_head(found, place, len(found.tokens))
    render.line()
    added = len(found.episode.first) if found.episode else 0
    render.heading(f"prompt, with {counted(added, 'message')} of the environment" if added else "prompt")
    render.line(render.printable(found.prompt))
    if found.episode is None:
        render.line()
        render.heading("response")
        render.line(render.weighted([render.printable(piece) for piece in found.pieces], weights))
        if found.differs_from_tokens:
            render.line()
            render.heading("response as scored")
            render.line(render.printable(found.response))
    else:
        from ppoctl.show.report.episode_parts import recorded_parts

        parts = recorded_parts(found.episode, {"value": found.values, "advantage": found.advantages})
        print_conversation(parts, found.pieces, weights)
    if any(weights) and render.is_coloured():
        render.line(f"({LEGENDS[by]})")
    render.line()
    _print_tokens(found)


def print_evaluated(row: "SampleRow", found: dict[str, Any]) -> None:
    """Print a sample of an evaluation."""
    place = f"{row.row} of the evaluation after step {row.step}: {row.set} {row.prompt_id} #{row.sample}"
    _print_head(row, place, row.tokens, answer=found["answer"], given=found.get("given"), extras=found.get("extras"))
    for name in ("prompt",) if "conversation" in found else ("prompt", "response"):
        render.line()
        render.heading(name)
        render.line(render.printable(found[name] or ""))
    if "conversation" in found:
        from ppoctl.show.report.episode_parts import evaluated_parts

        print_conversation(evaluated_parts(found["conversation"]))


def _print_head(
    found: "ShownSample | SampleRow",
    place: str,
    tokens: int,
    *,
    answer: str | None = None,
    given: str | None = None,
    extras: dict[str, float] | None = None,
) -> None:
    from ppoctl.store.stored_samples import END_TEXTS, finish_text

    answer = getattr(found, "answer", answer)
    reward = f"{found.outcome}, no score" if found.score is None else f"{found.outcome} {found.score:g}"
    further = "".join(f", {name} {value:g}" for name, value in (extras or {}).items() if value is not None)
    rows = [
        ("sample", place),
        ("finish", finish_text(found.finish, tokens, found.turns)),
        *([] if found.end is None else [("end", f"{found.end}: {END_TEXTS[found.end]}")]),
        ("answer", answer.splitlines()[-1] if answer else ""),
        *([] if given is None else [("given", given)]),
        ("reward", reward + further),
    ]
    render.table([(name, render.printable(text)) for name, text in rows])


def _weights(found: "ShownSample", by: TokenMetric) -> list[float]:
    """Return a number for each token: above 0 for green, below 0 for red, 0 for tokens of observations.

    All numbers are 0 if the metric is the advantage and the unfinished step has not computed it yet. Raises
    RecipeError if another metric was not recorded.
    """
    recorded = {"advantage": found.advantages, "value": found.values, "kl": found.kl}
    values = recorded[by]
    if values is None:
        if by == "advantage":
            return [0.0] * len(found.tokens)
        names = ", ".join(name for name, each in recorded.items() if each is not None) or "none"
        raise RecipeError(f"step {found.step} has no `{by}` of tokens; recorded: {names}", hint="omit --colour")
    mask = found.mask or [True] * len(values)
    generated = [value for value, is_generated in zip(values, mask, strict=True) if is_generated]
    middle = fmean(generated) if by == "value" and generated else 0.0
    return [value - middle if is_generated else 0.0 for value, is_generated in zip(values, mask, strict=True)]


def _print_tokens(found: "ShownSample") -> None:
    columns = {"advantage": found.advantages, "value": found.values, "log-prob": found.logprobs, "kl": found.kl}
    shown = {name: values for name, values in columns.items() if values is not None}
    form = {"log-prob": "{:.3f}", "kl": "{:+z.4f}"}
    cells = [[form.get(name, "{:+z.3f}").format(value) for value in values] for name, values in shown.items()]
    unknown = found.unknown or [False] * len(found.tokens)
    tokens = [
        f"{id} (not in the tokenizer)" if is_unknown else _token(piece)
        for id, piece, is_unknown in zip(found.tokens, found.pieces, unknown, strict=True)
    ]
    if found.mask is not None:
        cells = [
            [cell if is_generated else "-" for cell, is_generated in zip(column, found.mask, strict=True)]
            for column in cells
        ]
        cells += [["yes" if is_generated else "no: not in the loss" for is_generated in found.mask]]
    headers = ("token", *shown, *([] if found.mask is None else ["generated"]))
    render.table([*zip(tokens, *cells, strict=True)], headers)


def _token(piece: str) -> str:
    return render.printable(json_module.dumps(piece, ensure_ascii=False)) if piece else "(same character)"


def print_conversation(
    parts: "Iterable[EpisodePart]", pieces: Sequence[str] = (), weights: Sequence[float] = ()
) -> None:
    """Print the parts of an episode: its turns with their calls, and the observations.

    The first character of a line shows who wrote it, so that a text cannot imitate another part: a space for the
    actor, `>` for a call as the environment received it, `|` for the environment, and a letter for a title. `pieces`
    and `weights`: text and colour of each token of the response; without them, the texts of the messages are printed.
    """
    largest = max(map(abs, weights), default=0.0)
    for part in parts:
        render.line()
        render.heading(part.title)
        if not part.is_turn:
            for message in part.messages:
                _print_lines(f"| {render.clipped(_one_line(message.role), 20)}: ", message.content or "")
        elif part.start < part.end:
            texts = [_indented(piece) for piece in pieces[part.start : part.end]]
            render.line(f"  {render.weighted(texts, weights[part.start : part.end], largest)}")
        else:
            for message in part.messages:
                render.line(f"  {_indented(message.content or '')}")
        for call in part.calls:
            _print_lines("> ", _one_line(call))


def _print_lines(prefix: str, text: str) -> None:
    """Print the lines of a text, each after the prefix. On a terminal, long lines are wrapped."""
    room = shutil.get_terminal_size().columns - len(prefix) if render.is_terminal() else None
    for line in render.printable(text).split("\n"):
        for piece in _wrapped(line, room):
            render.line(f"{prefix}{piece}".rstrip())


def _wrapped(line: str, room: int | None) -> Iterator[str]:
    if room is None or len(line) <= room:
        yield line
    else:
        yield from textwrap.wrap(line, max(room, 8), drop_whitespace=False)


def _indented(text: str) -> str:
    return render.printable(text).replace("\n", "\n  ")


def _one_line(text: str) -> str:
    return render.printable(text).replace("\n", "\\n")
