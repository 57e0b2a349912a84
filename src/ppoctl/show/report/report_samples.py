"""Samples for a report.

From a few steps, the module selects the best, worst and longest samples, and samples of one prompt with different
scores. From evaluations, it selects samples that the actor learned to solve, or forgot.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.show.report.formatting import rounded
from ppoctl.show.report.run_reader import ReportedRun
from ppoctl.store import eval_samples, stored_samples
from ppoctl.store.outline import EVAL

if TYPE_CHECKING:
    from ppoctl.show.report.episode_parts import EpisodePart
    from ppoctl.show.report.shown_sample import ShownSample

Json = dict[str, Any]

EACH = 4
"""Number of samples of each kind."""
MOST_TOKENS = 1500
"""Maximum number of tokens of a sample on the page."""
MOST_CHARACTERS = 6000
"""Maximum number of characters of a text on the page."""


def kept_steps(run: ReportedRun, count: int) -> list[int]:
    """Return `count` of the steps whose rollouts are kept: the first, the last, and evenly spaced steps between."""
    found = stored_samples.steps_with_rollouts(run)
    if count >= len(found):
        return found
    if count <= 1:
        return found[-1:] * count
    return [found[round(at * (len(found) - 1) / (count - 1))] for at in range(count)]


def rollouts(run: ReportedRun, number: int, count: int, most_tokens: int = MOST_TOKENS) -> list[Json]:
    """Return a set of samples for each of `count` steps, with the first `most_tokens` tokens of each sample."""
    return [_of_step(run, number, step, most_tokens) for step in kept_steps(run, count)]


def _of_step(run: ReportedRun, number: int, step: int, most_tokens: int) -> Json:
    from ppoctl.show.report.shown_sample import read_samples

    found = read_samples(run, step)
    chosen = _chosen(found)
    items = [
        {"rank": rank, "kinds": kinds, **_rollout(found[row], most_tokens)}
        for row, (rank, kinds) in sorted(chosen.items(), key=lambda each: (each[1][0], each[0]))
    ]
    return {"run": number, "title": f"step {step}, rollouts", "total": len(found), "items": items}


def _chosen(found: Sequence["ShownSample"]) -> dict[int, tuple[int, list[str]]]:
    """Return row number -> (best rank of the row among all kinds, kinds of the row) for the chosen rows."""
    scored = [(at, sample.score) for at, sample in enumerate(found) if sample.score is not None]
    of_prompt: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for at, score in scored:
        of_prompt[found[at].prompt_id].append((at, score))
    by_spread = sorted(of_prompt.values(), key=lambda rows: min(s for _, s in rows) - max(s for _, s in rows))
    split = [rows for rows in by_spread if min(s for _, s in rows) < max(s for _, s in rows)][: EACH // 2]
    kinds = {
        **_best_and_worst(scored),
        "longest": sorted(range(len(found)), key=lambda at: -len(found[at].tokens)),
        "disagree": [at for rows in split for at in _ends(rows)],
        "no score": [at for at, sample in enumerate(found) if sample.score is None],
    }
    return _ranked(kinds)


def _best_and_worst(scored: Sequence[tuple[int, float]]) -> dict[str, list[int]]:
    """Return the better half of the scored rows, best first, and the worse half, worst first."""
    ordered = [at for at, _ in sorted(scored, key=lambda each: -each[1])]
    half = (len(ordered) + 1) // 2
    return {"best": ordered[:half], "worst": ordered[half:][::-1]}


def _ends(rows: Sequence[tuple[int, float]]) -> tuple[int, int]:
    """Return the best and the worst of a prompt's responses."""
    return max(rows, key=lambda row: row[1])[0], min(rows, key=lambda row: row[1])[0]


def _ranked(kinds: dict[str, list[int]]) -> dict[int, tuple[int, list[str]]]:
    chosen: dict[int, tuple[int, list[str]]] = {}
    for kind, rows in kinds.items():
        for rank, at in enumerate(rows[:EACH]):
            best, names = chosen.get(at, (rank, []))
            chosen[at] = (min(best, rank), [*names, kind])
    return chosen


def _rollout(sample: "ShownSample", most_tokens: int) -> Json:
    end = min(most_tokens, len(sample.tokens))
    columns = {
        "advantage": sample.advantages,
        "value": sample.values,
        "kl": sample.kl,
        "logprob": sample.logprobs,
    }
    mask = [True] * len(sample.tokens) if sample.mask is None else sample.mask
    return {
        "title": f"{sample.prompt_id} #{sample.sample}",
        "score": rounded(sample.score),
        "ended": _ended(sample.finish, len(sample.tokens), sample.turns, sample.end),
        "outcome": sample.outcome,
        "answer": cut(sample.answer),
        "prompt": cut(sample.prompt),
        "tokens": sample.pieces[:end],
        "cut": len(sample.tokens) - end,
        **{
            name: [
                rounded(value) if is_generated else None
                for value, is_generated in zip(values[:end], mask[:end], strict=True)
            ]
            for name, values in columns.items()
            if values is not None
        },
        **({} if sample.mask is None else {"mask": mask[:end]}),
        **_conversation(sample, end),
    }


def _conversation(sample: "ShownSample", end: int) -> Json:
    """Return the parts of an episode, if the sample is one. A part of which tokens are on the page has no text."""
    if sample.episode is None:
        return {}
    from ppoctl.show.report.episode_parts import recorded_parts

    parts = recorded_parts(sample.episode, {"value": sample.values, "advantage": sample.advantages})
    return {
        "parts": [
            {**_part(part), "from": part.start, "to": min(part.end, end), "text": None}
            if part.start < part.end
            else _part(part)
            for part in parts
            if part.start < end
        ]
    }


def _part(part: "EpisodePart") -> Json:
    text = "\n".join(
        (message.content or "") if part.is_turn else f"{message.role}: {message.content or ''}"
        for message in part.messages
    )
    return {
        "title": part.title[0].upper() + part.title[1:],
        "turn": part.is_turn,
        "text": cut(text),
        "calls": [cut(call) for call in part.calls],
    }


def _ended(finish: str, tokens: int, turns: int | None, end: str | None) -> str:
    text = stored_samples.finish_text(finish, tokens, turns)
    return text if end is None else f"{text} ({end}: {stored_samples.END_TEXTS[end]})"


# --- evaluations --------------------------------------------------------------------------------------------------


def evaluations(run: ReportedRun, number: int) -> list[Json]:
    """Return a set of samples for each evaluation set and mode of the newest evaluation.

    The samples are compared with the samples of the oldest evaluation that was kept.
    """
    steps = [step for step in run.paths.committed_steps() if (_folder(run, step) / eval_samples.SAMPLES).is_file()]
    if not steps:
        return []
    first, last = steps[0], steps[-1]
    newest = eval_samples.read(_folder(run, last))
    before = {_key(row): row for row in eval_samples.read(_folder(run, first))} if first != last else {}
    passes: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for row in newest:
        passes[row["set"], row["mode"]].append(row)
    return [
        {
            "run": number,
            "title": f"evaluation after step {last}, {name} {mode}",
            "total": len(rows),
            "items": _evaluated(rows, before, first),
        }
        for (name, mode), rows in passes.items()
    ]


def _folder(run: ReportedRun, step: int) -> Path:
    return run.paths.stage(step, EVAL)


def _key(row: Json) -> tuple[str, str, str, int]:
    return row["set"], row["mode"], str(row["prompt_id"]), int(row["sample"])


def _evaluated(rows: Sequence[Json], before: dict[tuple[str, str, str, int], Json], first: int) -> list[Json]:
    scored = [at for at, row in enumerate(rows) if row["score"] is not None]
    earlier = [before.get(_key(row)) for row in rows]

    def rise(at: int) -> float:
        then = earlier[at]
        return 0.0 if then is None or then["score"] is None else float(rows[at]["score"] - then["score"])

    def by(key: Callable[[int], float], among: Iterable[int]) -> list[int]:
        return sorted(among, key=lambda at: -key(at))

    kinds = {
        "learned": by(rise, [at for at in scored if rise(at) > 0]),
        "forgotten": by(lambda at: -rise(at), [at for at in scored if rise(at) < 0]),
        **_best_and_worst([(at, rows[at]["score"]) for at in scored]),
        "longest": by(lambda at: rows[at]["response_tokens"], range(len(rows))),
    }
    return [
        {"rank": rank, "kinds": names, **_evaluation(rows[at], earlier[at], first)}
        for at, (rank, names) in sorted(_ranked(kinds).items(), key=lambda each: (each[1][0], each[0]))
    ]


def _evaluation(row: Json, earlier: Json | None, first: int) -> Json:
    finish = "terminated" if row["terminated"] else "truncated"
    found: Json = {
        "title": f"{row['prompt_id']} #{row['sample']}",
        "score": rounded(row["score"]),
        "ended": _ended(finish, row["response_tokens"], row.get("turns"), row.get("end")),
        "outcome": str(row["outcome"]),
        "answer": cut(str(row["answer"] or "")),
        "prompt": cut(str(row["prompt"] or "")),
        "response": cut(str(row["response"])),
    }
    if "conversation" in row:
        from ppoctl.show.report.episode_parts import evaluated_parts

        found["parts"] = [_part(part) for part in evaluated_parts(row["conversation"])]
    if earlier is not None:
        score = "no score" if earlier["score"] is None else f"score {earlier['score']:.4g}"
        found["earlier"] = {"title": f"after step {first}: {score}", "response": cut(str(earlier["response"]))}
    return found


def cut(text: str) -> str:
    """Return the text. A long text is truncated and ends with the number of missing characters."""
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]}\n... and {more} more characters"
