"""Text about who worked and who waited in a step: bars for a terminal, and which side is the longer one."""

from collections.abc import Sequence
from typing import Any

from ppoctl.core.clock import duration
from ppoctl.show.report.who_waited import GENERATOR, PARTIES, REWARD, TRAINER, TRANSFER, WORKS, StepWaits

WIDEST, NARROWEST = 60, 12
"""Bounds of the number of cells of a bar."""
LEGEND = "# works  = weights are transferred  . waits"
RESUMED = "  | resumed"
SHORT = 0.05
"""Fraction of the time below which a wait does not matter."""
_FEW = 0.01
"""Fraction of a step below which a wait is not in the table."""
_FASTER = {
    GENERATOR: "give it more engines (`generator.engines`, or `generator.engines_per_gpu` for a small model)",
    TRAINER: "use larger microbatches (`actor.batching.max_tokens_per_microbatch`) or more ranks (`actor.parallel`)",
    REWARD: "score faster, for example with more processes (`reward.workers`)",
}


def bar(waits: StepWaits, party: str, cells: int) -> str:
    """Return a bar of the step: in each cell the state that takes most of its time. A party that works has at least
    one cell of work."""
    each = waits.seconds / cells
    states = [_seconds_by_state(waits, party, at * each, (at + 1) * each) for at in range(cells)]
    found = [_sign(seconds, each) for seconds in states]
    if waits.worked_s(party) > 0 and "#" not in found:
        found[max(range(cells), key=lambda at: states[at].get(WORKS, 0.0))] = "#"
    for moment in waits.resumed_at_s:
        found[min(int(moment / each), cells - 1)] = "|"
    return "".join(found)


def _seconds_by_state(waits: StepWaits, party: str, start_s: float, end_s: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in waits.spans[party]:
        seconds = min(span.end_s, end_s) - max(span.start_s, start_s)
        if seconds > 0:
            state = span.state if span.state in (WORKS, TRANSFER) else ""
            found[state] = found.get(state, 0.0) + seconds
    return found


def _sign(seconds: dict[str, float], cell_s: float) -> str:
    """Return the sign of a cell: a space if the party neither works nor waits for most of its time."""
    rest = cell_s - sum(seconds.values())
    state, longest = max(seconds.items(), key=lambda item: item[1], default=("", 0.0))
    return " " if rest > longest else {WORKS: "#", TRANSFER: "="}.get(state, ".")


def rows(waits: StepWaits, width: int) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the rows of a table with a bar of each party, and its headers, in lines of `width` characters."""
    headers = (f"step {waits.step} in {duration(waits.seconds)}", "", "worked", "waited for")
    texts = [(name, duration(waits.worked_s(name)), _waited(waits, name)) for name in PARTIES]
    taken = [max(map(len, column)) for column in zip((headers[0], *headers[2:]), *texts, strict=True)]
    cells = min(max(width - sum(taken) - 2 * len(taken), NARROWEST), WIDEST)
    return [(name, bar(waits, name, cells), *text) for name, *text in texts], headers


def legend(waits: StepWaits) -> str:
    """Return what the signs of the bars mean."""
    return LEGEND + (RESUMED if waits.resumed_at_s else "")


def _waited(waits: StepWaits, party: str) -> str:
    """Return the seconds for which a party waited for each other party, without very short ones."""
    waited = waits.waited_s(party).items()
    return ", ".join(f"{other} {duration(s)}" for other, s in waited if s >= _FEW * waits.seconds) or "-"


def summary(waits: StepWaits) -> str:
    """Return the times of a step as one sentence, for readers of a chart without the chart."""
    parts = [f"{name} worked {duration(waits.worked_s(name))}, waited for {_waited(waits, name)}" for name in PARTIES]
    resumed = "; the step was resumed" if waits.resumed_at_s else ""
    return f"step {waits.step} in {duration(waits.seconds)}: {'; '.join(parts)}{resumed}"


def longer_side(steps: Sequence[StepWaits]) -> str:
    """Return a sentence on which side takes longer in these steps, and what to change.

    Steps that were resumed are left out, because the work that an attempt did not finish is not known. "" if no other
    step is left.
    """
    whole = [step for step in steps if not step.resumed_at_s]
    whole = [step for step in whole if step.is_parallel == whole[-1].is_parallel]
    total = sum(step.seconds for step in whole)
    if total <= 0:
        return ""

    def fraction(party: str, state: str) -> float:
        return sum(step.in_state(party, state) for step in whole) / total

    if not whole[-1].is_parallel:
        return _in_turn({party: fraction(party, WORKS) for party in PARTIES})
    waited_for = {
        GENERATOR: (fraction(TRAINER, GENERATOR), TRAINER),
        TRAINER: (fraction(GENERATOR, TRAINER), GENERATOR),
        REWARD: (fraction(TRAINER, REWARD), TRAINER),
    }
    side, (waited, other) = max(waited_for.items(), key=lambda item: item[1][0])
    if waited < SHORT:
        return "Both sides take equally long: neither waits for more than 5 % of the time."
    waits_for_it = f"the {other} waits for it {_percent(waited)} of the time"
    return f"The {side} is the longer side: {waits_for_it}. To change this, {_FASTER[side]}."


def _in_turn(worked: dict[str, float]) -> str:
    """Return the sentence on steps that generate, score and train one after another."""
    side = max(worked, key=lambda party: worked[party])
    return (
        f"The {side} is the longer side: it works {_percent(worked[side])} of the time, and the others wait for it. "
        f"To change this, {_FASTER[side]}. `rollout.ahead = 1` generates while the step trains, if the recipe allows "
        "it."
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def table_rows(steps: Sequence[StepWaits]) -> list[tuple[str, ...]]:
    """Return the rows of the table of steps: step, seconds, generator worked, waited, trainer worked, waited, reward
    worked."""
    return [_table_row(step) for step in steps]


def _table_row(waits: StepWaits) -> tuple[str, ...]:
    def cells(party: str) -> tuple[str, str]:
        return duration(waits.worked_s(party)), duration(sum(waits.waited_s(party).values()))

    resumed = " (resumed)" if waits.resumed_at_s else ""
    return (
        f"{waits.step}{resumed}", duration(waits.seconds), *cells(GENERATOR), *cells(TRAINER),
        duration(waits.worked_s(REWARD)),
    )  # fmt: skip


def chart(steps: Sequence[StepWaits]) -> dict[str, Any]:
    """Return the data of the chart of steps, for the page: each party's spans as [start, end, state]."""
    return {
        "parties": list(PARTIES),
        "steps": [
            {
                "step": waits.step,
                "seconds": waits.seconds,
                "resumed": list(waits.resumed_at_s),
                "spans": [[[s.start_s, s.end_s, s.state] for s in waits.spans[name]] for name in PARTIES],
                "says": summary(waits),
            }
            for waits in steps
        ],
    }
