"""The metrics of a step, from its journal lines: one value of each metric, for any number of rounds of generation.

A metric of `rollout`, `reward` or `keep_groups` covers all rounds. The last `keep_groups` computes it from the
records of all rounds. No record contains the metrics in `OVER_ROUNDS`, and times are added up. All other metrics
describe the rows that their stage reads: with `critic_sees = "all"`, some stages read all rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ppoctl.core import metric_registry

StageLine = Mapping[str, Any]

SAVED = "saved"
"""Event of a state that was saved, with the seconds of the save and those for which training waited."""


def _of_generation(name: str, rounds: Sequence[StageLine]) -> float:
    """Return the mean, weighted by the seconds in which each round generated its tokens."""
    rate, tokens = metric_registry.THROUGHPUT_GENERATED.name, metric_registry.ROLLOUT_TOKENS.name
    seconds = [float(line["figures"].get(tokens, 1.0)) / float(line["clocked"][rate]) for line in rounds]
    return sum(s * float(line["clocked"][name]) for s, line in zip(seconds, rounds, strict=True)) / sum(seconds)


def _mean(name: str, rounds: Sequence[StageLine]) -> float:
    """Return the mean; rounds have equal numbers of responses."""
    return sum(float(line["clocked"][name]) for line in rounds) / len(rounds)


def _largest(name: str, rounds: Sequence[StageLine]) -> float:
    return max(float(line["clocked"][name]) for line in rounds)


def _sum(name: str, rounds: Sequence[StageLine]) -> float:
    return sum(float(line["clocked"][name]) for line in rounds)


OVER_ROUNDS: dict[str, Callable[[str, Sequence[StageLine]], float]] = {
    metric_registry.THROUGHPUT_GENERATED.name: _of_generation,
    metric_registry.THROUGHPUT_ENGINE_IDLE_FRAC.name: _of_generation,
    metric_registry.TIME_TRANSFER_S.name: _sum,
    metric_registry.TIME_GENERATION_S.name: _sum,
    **dict.fromkeys(metric_registry.WAITS, _sum),
    **dict.fromkeys(metric_registry.PEAKS, _largest),
    metric_registry.REWARD_SECONDS_MEAN.name: _mean,
    metric_registry.REWARD_SECONDS_MAX.name: _largest,
}
"""Measured metrics of a step with several rounds -> their value over the rounds that measured them."""


def reported(line: StageLine) -> dict[str, float]:
    """Return all metrics of a journal line: the values of the record and the measured times. A save is the only event
    with a metric. The time of a later round is that of all rounds so far."""
    if line.get("event") == SAVED:
        return {metric_registry.save_metric(line["role"]): line["waited_s"]}
    if "stage" not in line:
        return {}
    seconds = {f"time/{line['stage'].partition('.')[0]}_s": line.get("rounds_s", line["seconds"])}
    return {**line.get("figures", {}), **line.get("clocked", {}), **seconds}


def rounds_of(lines: Iterable[StageLine]) -> dict[str, dict[int, StageLine]]:
    """Return the valid lines of a step: name of the stage, or of a save -> round -> line. `lines` are journal lines
    of this step, oldest first.

    A later line of a stage, or of a save of a role, replaces the earlier one, and further rounds of an earlier run of
    the step are left out.
    """
    rounds: dict[str, dict[int, StageLine]] = {}
    for line in lines:
        name, _, number = line.get("stage", f"save of {line.get('role')}").partition(".")
        earlier = {each: old for each, old in rounds.pop(name, {}).items() if each < int(number or 1)}
        rounds[name] = {**earlier, int(number or 1): line}
    return rounds


def of_step(lines: Iterable[StageLine]) -> dict[str, float]:
    """Return the value of each metric of a step. `lines` are journal lines of this step, oldest first."""
    found: dict[str, float] = {}
    for of_stage in rounds_of(lines).values():
        found |= reported(list(of_stage.values())[-1])
        for name, over in OVER_ROUNDS.items() if len(of_stage) > 1 else ():
            if measured := [line for line in of_stage.values() if name in line.get("clocked", {})]:
                found[name] = over(name, measured)
    return found
