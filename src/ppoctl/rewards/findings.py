"""What a trial of a reward shows: whether the right answer wins, whether something cheap wins too, whether length
alone pays, and what the scorer chokes on."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ppoctl.rewards.probe import MEND
from ppoctl.rewards.trial import ATTACKS, LENGTHS, TRIVIAL, Trial

FAULTY_FRAC = 0.01
"""Share of rows on which gold may fail to win: real data has a few rows that are wrong."""
CHEAP_FRAC = 0.05
"""Share of rows on which a response that anybody can write may score as the gold answer does."""

Level = Literal["ok", "note", "warning", "wrong"]


@dataclass(frozen=True)
class RewardFinding:
    """One sentence about a reward. `wrong` is what no run should start with."""

    level: Level
    says: str
    hint: str | None = None
    """What mends it, where that is known."""


def findings(trial: Trial) -> list[RewardFinding]:
    """All that is to be said of a trial, the gravest first within each subject."""
    if not trial.tried:
        return [_faulty_rows(trial)]
    found = [*_of_gold(trial)] if trial.has_gold else [*_without_gold(trial)]
    is_lost = any(each.level == "wrong" for each in found)
    return [
        *found,
        *_missing(trial),
        *_attacked(trial, best=None if is_lost else max(trial.scored("gold"), default=None)),
    ]


def _of_gold(trial: Trial) -> Iterator[RewardFinding]:
    first = _gold_wins(trial)
    yield first
    if first.level == "wrong":  # what scores as gold does then says nothing
        return
    for name in ("question", *TRIVIAL):
        share = trial.as_gold(name)
        if name != "empty" and share is not None and share > CHEAP_FRAC:
            yield RewardFinding("warning", f"`{name}` scores as the gold answer does on {share:.1%} of the rows")
    hedged = [trial.as_gold(name) or 0.0 for name in ("gold, then wrong", "wrong, then gold")]
    if min(hedged) > 0.5:
        yield RewardFinding(
            "warning", "a response that gives two answers scores as the gold one does, whichever is last"
        )
    yield from _lengths_of_gold(trial)
    others = {name: trial.as_gold(name) or 0.0 for name in trial.names if name.startswith("as `")}
    if missed := [name.removeprefix("as ") for name, share in others.items() if share < 0.5]:
        yield RewardFinding(
            "note", f"a right answer is not credited in full as {', '.join(missed)}: let the prompt ask for the form"
        )


def _gold_wins(trial: Trial) -> RewardFinding:
    if (faulty := _losing(trial)) or trial.faults:
        return _faulty_rows(trial, faulty)
    return RewardFinding("ok", f"gold beats wrong, empty and cut answers on all {len(trial.rows)} rows")


def _losing(trial: Trial) -> list[str]:
    """Rows on which gold does not beat the three others, with what each scored."""
    by_row: dict[str, dict[str, float | None]] = {}
    for each in trial.tried:
        by_row.setdefault(each.row, {})[each.name] = each.score.value
    lost = []
    for row, values in by_row.items():
        told = {name: values.get(name) for name in ("gold", "wrong", "empty", "cut")}
        gold = told["gold"]
        if gold is None or any(value is None or value >= gold for name, value in told.items() if name != "gold"):
            said = ", ".join(
                f"{name} {'no score' if value is None else f'{value:g}'}" for name, value in told.items()
            )
            lost.append(f"`{row}`: {said}")
    return lost


def _faulty_rows(trial: Trial, lost: list[str] | None = None) -> RewardFinding:
    all_lost = [*(f"`{row}`: {why}" for row, why in trial.faults.items()), *(lost or ())]
    share = len(all_lost) / len(trial.rows)
    more = "" if len(all_lost) < 2 else f" (and {len(all_lost) - 1} more)"
    level: Level = "wrong" if share > FAULTY_FRAC else "warning"
    return RewardFinding(
        level, f"gold does not win on {share:.1%} of {len(trial.rows)} rows; first {all_lost[0]}{more}"
    )


def _lengths_of_gold(trial: Trial) -> Iterator[RewardFinding]:
    before, after, wrong = (trial.as_gold(name) for name in ("filler, gold", "gold, filler", "filler, wrong"))
    if before is not None and before < 1 - CHEAP_FRAC:
        yield RewardFinding(
            "warning", f"after 2,000 characters more a right answer scores lower on {1 - before:.1%} of the rows"
        )
    if wrong is not None and wrong > CHEAP_FRAC:
        yield RewardFinding(
            "warning", f"after 2,000 characters more a wrong answer scores as gold on {wrong:.1%} of the rows"
        )
    if after is not None and after < 0.5:
        yield RewardFinding("note", "a right answer counts at the end of a response only")
    repeated = trial.as_gold("gold repeated")
    if repeated is not None and repeated < 0.5:
        yield RewardFinding("note", "a right answer that is repeated scores less than one that is said once")
    elif repeated is not None:
        gold, again = trial.scored("gold"), trial.scored("gold repeated")
        if sum(again) / len(again) > sum(gold) / len(gold):
            yield RewardFinding("warning", "a right answer that is repeated scores more than one that is said once")


def _without_gold(trial: Trial) -> Iterator[RewardFinding]:
    values = {name: trial.scored(name) for name in trial.names if name not in ATTACKS}
    known = {name: sum(found) / len(found) for name, found in values.items() if found}
    if not known:
        yield RewardFinding("wrong", "no response has a score")
        return
    yield RewardFinding("note", "this kind knows no gold answer: look at the scores above, and at the first rollouts")
    if len({value for found in values.values() for value in found}) == 1:
        told = f"all that was tried scores {next(iter(known.values())):g}: what would score more is not seen here"
        yield RewardFinding("warning", told)
        return
    cheap = max(known, key=lambda name: known[name])
    if cheap in TRIVIAL:
        yield RewardFinding("warning", f"`{cheap}` scores highest of all that was tried, {known[cheap]:g} on average")
    steps = [known.get(f"{count} x filler") for count in LENGTHS]
    if any(step is None for step in steps):
        return
    numbers = [step for step in steps if step is not None]
    told = " -> ".join(f"{number:.3g}" for number in numbers)
    if numbers == sorted(numbers) and numbers[0] < numbers[-1]:
        yield RewardFinding(
            "warning", f"the score rises with length alone: {told} for {_counts()} sentences that say nothing"
        )
    elif numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]:
        yield RewardFinding(
            "note", f"the score falls with length alone: {told} for {_counts()} sentences that say nothing"
        )


def _counts() -> str:
    return ", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}"


def _missing(trial: Trial) -> Iterator[RewardFinding]:
    plain = [each for each in trial.tried if each.name not in ATTACKS]
    missing = [each for each in plain if each.score.value is None]
    if missing:
        first = missing[0]
        says = f"{len(missing)} of {len(plain)} responses have no score; first `{first.name}` of `{first.row}`: "
        # What a scorer refuses may be longer than any response of the run.
        failed = sum(each.score.outcome != "refused" for each in missing)
        level: Level = "wrong" if failed / len(plain) > CHEAP_FRAC else "warning"
        mend = MEND if any(each.score.outcome == "error" for each in missing) else None
        yield RewardFinding(level, f"{says}{first.score.outcome} {first.score.message}".rstrip(), mend)


def _attacked(trial: Trial, *, best: float | None) -> Iterator[RewardFinding]:
    """What came of the attacks; `best` is the score of a gold answer, where there is one that means something."""
    for each in (each for each in trial.tried if each.name in ATTACKS):
        score = each.score
        if score.outcome == "timeout":
            yield RewardFinding("warning", f"{each.name}: {score.message}; each such response costs that much time")
        elif score.value is None:
            yield RewardFinding("note", f"{each.name}: {score.outcome}, {score.message}")
        elif best is not None and score.value >= best:
            yield RewardFinding("warning", f"{each.name}: scores {score.value:g}, as the gold answer does")
