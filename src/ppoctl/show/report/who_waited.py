"""Work and waits of the parties of a step: intervals from the journal lines of the step. Imports no torch.

A stage of the main thread takes the `seconds` before `at`. The party of the stage works, the others wait for it:

    party      works in
    generator  the generation of a rollout (`time/generation_s`), which ends with its stage; that of a stage beside
               others begins at `began_at`, and that of a later step may end in the next step
    reward     the stages that score
    trainer    all other stages, except an evaluation, which is not a part of the step

Trainer and generator neither work nor wait while weights are transferred. No party waits between stages, when states
are saved, and while a component starts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

from ppoctl.core import metric_registry
from ppoctl.core.speed_metrics import TIME_CANCELLED_S
from ppoctl.core.step_metrics import StageLine, rounds_of
from ppoctl.store.journal import BEGAN_AT, JournalLine
from ppoctl.store.outline import EVAL, Outlines

GENERATOR, TRAINER, REWARD = "generator", "trainer", "reward"
PARTIES = (GENERATOR, TRAINER, REWARD)
WORKS, TRANSFER = "works", "transfer"
"""States of a party. A further state is the name of the party that it waits for."""

_Span = tuple[float, float]


@dataclass(frozen=True)
class PartySpan:
    """Time in which a party has one state, in seconds since the step began."""

    start_s: float
    end_s: float
    state: str
    """`WORKS`, `TRANSFER`, or the name of the party that it waits for."""


@dataclass(frozen=True)
class StepWaits:
    """Work and waits of one step. Time between two attempts is left out."""

    step: int
    seconds: float
    is_parallel: bool
    """Whether the responses of the next step were generated in this step (`rollout.ahead`)."""
    resumed_at_s: tuple[float, ...]
    """Seconds since the step began at which another attempt continued the step."""
    spans: Mapping[str, tuple[PartySpan, ...]]
    """Spans of each party, in order. In the time between them, the party neither works nor waits."""

    def in_state(self, party: str, state: str) -> float:
        """Return the seconds for which a party has a state."""
        return round(sum(span.end_s - span.start_s for span in self.spans[party] if span.state == state), 6)

    def worked_s(self, party: str) -> float:
        """Return the seconds for which a party works."""
        return self.in_state(party, WORKS)

    def waited_s(self, party: str) -> dict[str, float]:
        """Return the seconds for which a party waits, by the party that it waits for, longest first."""
        found = {other: self.in_state(party, other) for other in PARTIES if other != party}
        return {other: s for other, s in sorted(found.items(), key=lambda item: -item[1]) if s > 0}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "StepWaits":
        """Return the waits from the result of `as_json`."""
        spans = {party["name"]: tuple(PartySpan(*span) for span in party["spans"]) for party in found["parties"]}
        resumed_at_s = tuple(found["resumed_at_s"])
        return StepWaits(found["step"], found["seconds"], found["is_parallel"], resumed_at_s, spans)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, which `status --json` prints."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "is_parallel": self.is_parallel,
            "resumed_at_s": list(self.resumed_at_s),
            "parties": [
                {
                    "name": name,
                    "worked_s": self.worked_s(name),
                    "waited_s": self.waited_s(name),
                    "spans": [[span.start_s, span.end_s, span.state] for span in self.spans[name]],
                }
                for name in PARTIES
            ],
        }


def newest_steps(lines: Iterable[JournalLine], outlines: Outlines, *, at_most: int) -> list[StepWaits]:
    """Return the newest complete steps, oldest first, without steps whose generation was not measured."""
    by_step: dict[int, list[JournalLine]] = {}
    for line in lines:
        if "stage" in line:
            by_step.setdefault(int(line["step"]), []).append(line)
    found: list[StepWaits] = []
    for step in sorted(by_step, reverse=True):
        is_complete = any(line["stage"] == outlines.at(step).last for line in by_step[step])
        if is_complete and len(found) < at_most and (waits := _waits_of(by_step, step)) is not None:
            found.insert(0, waits)
    return found


def _waits_of(by_step: Mapping[int, Sequence[StageLine]], step: int) -> StepWaits | None:
    near = (step - 1, step, step + 1)
    return step_waits([line for each in near for line in by_step.get(each, ())], step)


def step_waits(lines: Sequence[StageLine], step: int) -> StepWaits | None:
    """Return who worked and waited in a step. `lines` has the journal lines of the step, and of those next to it: a
    generation of the step before may end in this one, and one of this step in the next.

    None: the step has no rollout, or a version of ppoctl ran it that did not record when the rollout began, and how
    long it took.
    """
    before, own, after = (_stages(lines, each) for each in (step - 1, step, step + 1))
    first, end = (min((float(line["at"]) for line in of), default=inf) for of in (own, after))
    ending = [line for line in before if _is_parallel(line) and float(line["at"]) >= first]
    open_ones = [line for line in own if _is_parallel(line) and float(line["at"]) >= end]
    stages = sorted([*ending, *(line for line in own if line not in open_ones)], key=lambda line: float(line["at"]))
    rollouts = [line for line in (*stages, *open_ones) if _seconds_name(line) in metric_registry.ROLLOUTS_S]
    if not rollouts or any(map(_is_unmeasured, rollouts)):
        return None
    parallel = {line["attempt"] for line in rollouts if _is_parallel(line)}
    spans: dict[str, list[PartySpan]] = {party: [] for party in PARTIES}
    offset, resumed_at_s = 0.0, []
    for attempt in sorted({line["attempt"] for line in stages}):
        committed, later = ([line for line in of if line["attempt"] == attempt] for of in (stages, open_ones))
        part = _part(committed, later, step)
        # An earlier attempt generated too, but its generation was killed, and left no line.
        is_generator_known = all(attempt >= each for each in parallel)
        if offset > 0:
            resumed_at_s.append(round(offset, 6))
        for party in PARTIES:
            spans[party] += part.spans(party, offset, can_wait=is_generator_known or party != GENERATOR)
        offset += part.end - part.start
    return StepWaits(
        step=step,
        seconds=round(offset, 6),
        is_parallel=bool(parallel),
        resumed_at_s=tuple(resumed_at_s),
        spans={party: tuple(_joined(found)) for party, found in spans.items()},
    )


def _stages(lines: Iterable[StageLine], step: int) -> list[StageLine]:
    """Return the valid lines of the stages of a step, without an evaluation."""
    of_step = rounds_of(line for line in lines if line.get("step") == step)
    stages = (line for rounds in of_step.values() for line in rounds.values() if "stage" in line)
    return [line for line in stages if _name(line) != EVAL]


@dataclass(frozen=True)
class _AttemptPart:
    """The part of a step that one attempt ran, in seconds of the clock of its machine."""

    stages: Sequence[tuple[_Span, str]]
    """Intervals in which the step is in a stage, and the party of the stage, in order."""
    work: Sequence[tuple[_Span, str]]
    transfers: Sequence[_Span]

    @property
    def edges(self) -> list[float]:
        found = [*(span for span, _ in (*self.stages, *self.work)), *self.transfers]
        return sorted({edge for span in found for edge in span})

    @property
    def start(self) -> float:
        return self.edges[0]

    @property
    def end(self) -> float:
        return self.edges[-1]

    def spans(self, party: str, offset: float, *, can_wait: bool) -> list[PartySpan]:
        """Return the spans of a party, with `offset` seconds of the step before this part."""
        moved = offset - self.start
        return [
            PartySpan(round(start + moved, 6), round(end + moved, 6), state)
            for start, end in pairwise(self.edges)
            if (state := self._state(party, (start + end) / 2)) in (WORKS, TRANSFER) or (state and can_wait)
        ]

    def _state(self, party: str, at: float) -> str:
        """Return the state of a party at a moment; "" if it neither works nor waits."""
        if any(who == party and _has(span, at) for span, who in self.work):
            return WORKS
        if party != REWARD and any(_has(span, at) for span in self.transfers):
            return TRANSFER
        return next((who for span, who in self.stages if _has(span, at) and who != party), "")


def _has(span: _Span, at: float) -> bool:
    return span[0] <= at < span[1]


def _part(lines: Sequence[StageLine], open_ones: Sequence[StageLine], step: int) -> _AttemptPart:
    """Return the part of a step that one attempt ran. `lines` are the stages that it committed meanwhile, in order,
    and the generations `open_ones` began in it and end later."""
    stages: list[tuple[_Span, str]] = []
    work: list[tuple[_Span, str]] = []
    transfers: list[_Span] = []
    starts: list[float] = []
    for line in (*lines, *open_ones):
        party, at, seconds = _party(line), float(line["at"]), float(line["seconds"])
        clocked = line.get("clocked", {})
        transfer_s = float(clocked.get(metric_registry.TIME_TRANSFER_S.name, 0.0))
        generation_s = float(clocked.get(metric_registry.TIME_GENERATION_S.name, 0.0))
        start, worked, transfer = at - seconds, (at - seconds, at), None
        if BEGAN_AT in line:
            began = float(line[BEGAN_AT])
            worked, transfer = (began, began + generation_s), (began - transfer_s, began)
            # The transfer is a part of the seconds, but was before the other stages.
            start = at - max(seconds - transfer_s, 0.0)
        elif _seconds_name(line) in metric_registry.ROLLOUTS_S:  # greedy responses have no such metrics
            worked, transfer = (at - generation_s, at), (start, start + transfer_s)
        if line not in open_ones:
            stages.append(((start, at), party))
        if line["step"] == step:
            starts.append(start if transfer is None else min(start, transfer[0]))
        work.append((worked, party))
        transfers += [] if transfer is None else [transfer]
        if cancelled_s := float(clocked.get(TIME_CANCELLED_S.name, 0.0)):
            began = min([*_scores_before(line, lines), at - cancelled_s])
            work.append(((began, began + cancelled_s), GENERATOR))
    first, last = min(starts, default=stages[0][0][0]), max(end for (_, end), _ in stages)

    def cut(span: _Span) -> _Span:
        """Return the part of a span that is in this part of the step."""
        return max(span[0], first), max(first, min(span[1], last))

    return _AttemptPart(stages, [(cut(span), party) for span, party in work], [*map(cut, transfers)])


def _start(line: StageLine) -> float:
    return float(line["at"]) - float(line["seconds"])


def _scores_before(line: StageLine, lines: Sequence[StageLine]) -> list[float]:
    """Return the start of the last stage before this one that scored; empty: there is none."""
    return [_start(each) for each in lines if _party(each) == REWARD and each["at"] < line["at"]][-1:]


def _joined(spans: Iterable[PartySpan]) -> list[PartySpan]:
    """Return the spans, of which those of one state that follow each other are one span."""
    found: list[PartySpan] = []
    for span in spans:
        if span.end_s <= span.start_s:  # rounding of the clock
            continue
        if found and found[-1].state == span.state and found[-1].end_s == span.start_s:
            found[-1] = PartySpan(found[-1].start_s, span.end_s, span.state)
        else:
            found.append(span)
    return found


def _name(line: StageLine) -> str:
    return str(line["stage"]).partition(".")[0]


def _seconds_name(line: StageLine) -> str:
    return f"time/{_name(line)}_s"


def _is_parallel(line: StageLine) -> bool:
    return _seconds_name(line) in metric_registry.PARALLEL_S


def _party(line: StageLine) -> str:
    if _seconds_name(line) in metric_registry.GENERATIONS_S:
        return GENERATOR
    return REWARD if _seconds_name(line) in metric_registry.SCORINGS_S else TRAINER


def _is_unmeasured(line: StageLine) -> bool:
    """Whether the engines generated, and how long they did, or since when, is not recorded. Loaded samples were not
    generated."""
    clocked = line.get("clocked", {})
    names = metric_registry.THROUGHPUT_GENERATED.name, metric_registry.TIME_GENERATION_S.name
    return (names[0] in clocked and names[1] not in clocked) or (_is_parallel(line) and BEGAN_AT not in line)
