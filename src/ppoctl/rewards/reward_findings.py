"""Findings of a reward trial: whether the correct answer scores best, whether a trivial response scores as well,
whether length alone is rewarded, and which responses the scorer fails on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ppoctl.core.batch.scorer_metrics import require_own_names
from ppoctl.core.errors import RewardError
from ppoctl.core.finding import Finding, Level, note, ok, warning
from ppoctl.rewards.probe import MEND
from ppoctl.rewards.trial import ATTACKS, LENGTHS, PARTLY_RIGHT, TRIVIAL, Trial

FAULTY_FRAC = 0.01
"""Largest fraction of rows on which the gold answer may fail to score best, because real data has a few wrong
rows."""
CHEAP_FRAC = 0.05
"""Largest fraction of rows on which a trivial response may score as well as the gold answer."""
_SHOWN_CHARS = 60

_ok, _note = partial(ok, where="", kind="reward"), partial(note, kind="reward")
_warning = partial(warning, kind="reward")


def _wrong(what: str, *, hint: str | None = None) -> Finding:
    """Return a finding with which no run should start."""
    return Finding(Level.ERROR, what, hint=hint, kind="reward", error=RewardError)


def findings(trial: Trial) -> list[Finding]:
    """Return all findings of a trial, the most serious first within each subject."""
    return [replace(found, where=trial.scorer) for found in _findings(trial)]


def _findings(trial: Trial) -> list[Finding]:
    if not trial.tried and not trial.faults:
        return [_note("the environment returns the score of an episode: there are no answers to try")]
    if not trial.tried:
        return [_faulty_rows(trial)]
    about_answers = [*_of_gold(trial)] if trial.has_gold else [*_without_gold(trial)]
    is_wrong = any(finding.is_error for finding in about_answers)
    return [
        *about_answers,
        *_opened(trial),
        *_metrics(trial),
        *_missing(trial),
        *_attacked(trial, best=None if is_wrong else max(trial.scored("gold"), default=None)),
    ]


def _of_gold(trial: Trial) -> Iterator[Finding]:
    first = _gold_wins(trial)
    yield first
    if first.is_error:  # the findings below compare with the gold answer
        return
    yield from _partly_right(trial)
    for name in ("question", *TRIVIAL):
        share = trial.as_gold(name)
        if name != "empty" and share is not None and share > CHEAP_FRAC:
            yield _warning(f"`{name}` scores as well as the gold answer on {share:.1%} of the rows")
    hedged = [trial.as_gold(name) or 0.0 for name in ("gold, then wrong", "wrong, then gold")]
    if min(hedged) > 0.5:
        yield _warning("a response with two answers scores as well as the gold answer, whichever comes last")
    yield from _lengths_of_gold(trial)
    others = {name: trial.as_gold(name) or 0.0 for name in trial.names if name.startswith("as `")}
    if missed := [name.removeprefix("as ") for name, share in others.items() if share < 0.5]:
        yield _note(
            f"a correct answer does not get full credit as {', '.join(missed)}: request the format in the prompt",
        )


def _partly_right(trial: Trial) -> Iterator[Finding]:
    """Yield a finding if wrong answers score as well as the gold answer of their row. Real data
    has a few such rows: an answer may have equal values on both ends, or a unit with a number."""
    gold = {tried.row: tried.score.value for tried in trial.of("gold")}
    lost: dict[str, str] = {}
    for tried in (tried for name in PARTLY_RIGHT for tried in trial.of(name)):
        value, best = tried.score.value, gold.get(tried.row)
        if value is not None and best is not None and value >= best:
            lost.setdefault(tried.row, f"`{tried.row}`: `{tried.text[-_SHOWN_CHARS:]}` scores {value:g}")
    if lost:
        share = len(lost) / len(trial.rows)
        level = _wrong if share > CHEAP_FRAC else _warning
        yield level(
            f"a wrong answer that agrees with a part of the ground truth scores as gold on {share:.1%} of the rows; "
            f"first {next(iter(lost.values()))}"
        )


def _gold_wins(trial: Trial) -> Finding:
    if (faulty := _losing(trial)) or trial.faults:
        return _faulty_rows(trial, faulty)
    return _ok(f"gold beats wrong, empty and cut answers on all {len(trial.rows)} rows")


def _losing(trial: Trial) -> list[str]:
    """Return the rows on which the gold answer does not score higher than the three other candidates, each with its
    scores."""
    by_row: dict[str, dict[str, float | None]] = {}
    for tried in trial.tried:
        by_row.setdefault(tried.row, {})[tried.name] = tried.score.value
    lost = []
    for row, values in by_row.items():
        scores = {name: values.get(name) for name in ("gold", "wrong", "empty", "cut")}
        gold = scores["gold"]
        if gold is None or any(value is None or value >= gold for name, value in scores.items() if name != "gold"):
            listed = ", ".join(
                f"{name} {'no score' if value is None else f'{value:g}'}" for name, value in scores.items()
            )
            lost.append(f"`{row}`: {listed}")
    return lost


def _faulty_rows(trial: Trial, lost: list[str] | None = None) -> Finding:
    all_lost = [*(f"`{row}`: {why}" for row, why in trial.faults.items()), *(lost or ())]
    share = len(all_lost) / len(trial.rows)
    more = "" if len(all_lost) < 2 else f" (and {len(all_lost) - 1} more)"
    level = _wrong if share > FAULTY_FRAC else _warning
    return level(f"gold does not win on {share:.1%} of {len(trial.rows)} rows; first {all_lost[0]}{more}")


def _lengths_of_gold(trial: Trial) -> Iterator[Finding]:
    before, after, wrong = (trial.as_gold(name) for name in ("filler, gold", "gold, filler", "filler, wrong"))
    if before is not None and before < 1 - CHEAP_FRAC:
        yield _warning(
            f"after 2,000 characters of filler a correct answer scores lower on {1 - before:.1%} of the rows",
        )
    if wrong is not None and wrong > CHEAP_FRAC:
        yield _warning(f"after 2,000 characters of filler a wrong answer scores as gold on {wrong:.1%} of the rows")
    if after is not None and after < 0.5:
        yield _note("a correct answer scores only at the end of a response")
    repeated = trial.as_gold("gold repeated")
    if repeated is not None and repeated < 0.5:
        yield _note("a correct answer scores less if it is repeated")
    elif repeated is not None:
        gold, again = trial.scored("gold"), trial.scored("gold repeated")
        if sum(again) / len(again) > sum(gold) / len(gold):
            yield _warning("a correct answer scores more if it is repeated")


def _without_gold(trial: Trial) -> Iterator[Finding]:
    values = {name: trial.scored(name) for name in trial.names if name not in ATTACKS}
    means = {name: sum(scores) / len(scores) for name, scores in values.items() if scores}
    if not means:
        yield _wrong("no response has a score")
        return
    yield _note("this kind cannot build a gold answer: check the scores above, and the first rollouts")
    if len({value for scores in values.values() for value in scores}) == 1:
        message = f"all responses score {next(iter(means.values())):g}: the trial does not show what would score more"
        yield _warning(message)
        return
    best = max(means, key=lambda name: means[name])
    if best in TRIVIAL:
        yield _warning(f"`{best}` scores highest of all responses tried, {means[best]:g} on average")
    by_length = [means.get(f"{count} x filler") for count in LENGTHS]
    if any(mean is None for mean in by_length):
        return
    numbers = [mean for mean in by_length if mean is not None]
    trend = " -> ".join(f"{number:.3g}" for number in numbers)
    if numbers == sorted(numbers) and numbers[0] < numbers[-1]:
        yield _warning(f"the score rises with length alone: {trend} for {_counts()} sentences without content")
    elif numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]:
        yield _note(f"the score falls with length alone: {trend} for {_counts()} sentences without content")


def _counts() -> str:
    return ", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}"


def _opened(trial: Trial) -> Iterator[Finding]:
    if trial.opened:
        row, text = next(iter(trial.opened.items()))
        yield _warning(
            f"the prompts of {len(trial.opened)} of {len(trial.rows)} rows (first `{row}`) end with `{text}`, "
            "which the reward requires in the response",
            hint=f"remove `{text}` from the end of the prompts, or from the beginning of `pattern`",
        )


def _metrics(trial: Trial) -> Iterator[Finding]:
    """Yield the findings on the metrics that the scorer returns with its scores."""
    scores = [tried.score for tried in trial.tried if tried.score.value is not None]
    try:
        require_own_names(scores)
    except RewardError as error:
        yield _wrong(error.message, hint=error.hint)
    counts = Counter(name for score in scores for name in score.extras)
    if some := [f"`{name}`" for name, count in sorted(counts.items()) if count < len(scores)]:
        yield _note(f"only some responses have {', '.join(some)}: each mean is over the responses that have it")


def _missing(trial: Trial) -> Iterator[Finding]:
    plain = [tried for tried in trial.tried if tried.name not in ATTACKS]
    missing = [tried for tried in plain if tried.score.value is None]
    if missing:
        first = missing[0]
        counted = f"{len(missing)} of {len(plain)} responses have no score; first `{first.name}` of `{first.row}`: "
        # A scorer may refuse a response that is longer than any response of the run, so a refusal does not count as a
        # failure.
        failed = sum(tried.score.outcome != "refused" for tried in missing)
        level = _wrong if failed / len(plain) > CHEAP_FRAC else _warning
        hint = MEND if any(tried.score.outcome == "error" for tried in missing) else None
        yield level(f"{counted}{first.score.outcome} {first.score.message}".rstrip(), hint=hint)


def _attacked(trial: Trial, *, best: float | None) -> Iterator[Finding]:
    """Yield the findings about attacks. `best` is the score of a gold answer; None: no gold answer was scored."""
    for attack in (tried for tried in trial.tried if tried.name in ATTACKS):
        score = attack.score
        if score.outcome == "timeout":
            yield _warning(f"{attack.name}: {score.message}; each such response costs that much time")
        elif score.value is None:
            yield _note(f"{attack.name}: {score.outcome}, {score.message}")
        elif best is not None and score.value >= best:
            yield _warning(f"{attack.name}: scores {score.value:g}, as much as the gold answer")
