"""Steps of algorithms with rounds, selections and reads of the step before, written record by record.

Every sample has its own seed, which its response names, and a score computed from the seed: so a test sees whether a
reader of the step shows a sample beside its own score. All rounds have the same prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fakes.job import Stops, new_run_dir
from ppoctl.core.batch.records import Advantages, Logprobs, Record, Rewards, Rollouts, Selection, State, Update
from ppoctl.core.batch.selection import take
from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import Journal
from ppoctl.store.outline import Outline, OutlineEntry, Outlines
from ppoctl.store.recorded_run import STORIES
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import StageRunner

SELECTED = (
    OutlineEntry("logprobs", ("actor", "rollout"), rows="keep"),
    OutlineEntry("advantages", ("rollout", "reward", "logprobs", "carry"), rows="keep"),
    OutlineEntry("actor_update", ("actor", "rollout", "logprobs", "advantages"), "actor"),
)
"""The stages after the selection `keep`."""

ROUNDS = Outline(
    "rounds",
    (
        OutlineEntry("rollout", ("actor", "prompts"), at_most=3, loop=1),
        OutlineEntry("reward", ("prompts", "rollout"), at_most=3, loop=1),
        OutlineEntry("keep", ("rollout", "reward"), rows="keep", at_most=3, loop=1),
        *SELECTED,
    ),
)
"""Up to three rounds of generation, until the selection is full."""

RESAMPLED = Outline(
    "resampled",
    (
        OutlineEntry("rollout", ("actor", "prompts")),
        OutlineEntry("reward", ("prompts", "rollout")),
        OutlineEntry("keep", ("rollout", "reward"), rows="keep"),
        *SELECTED,
    ),
)


def steps_ahead(steps: int) -> Outlines:
    """Return the outlines of steps that train on the responses of `steps` steps before."""
    read = f"rollout_ahead@-{steps}"
    first = Outline(
        "ahead_first",
        (
            OutlineEntry("rollout", ("actor", "prompts")),
            OutlineEntry("reward", ("prompts", "rollout")),
            OutlineEntry("advantages", ("rollout", "reward", "carry")),
            OutlineEntry("rollout_ahead", ("actor", "prompts"), rows="rollout_ahead"),
            OutlineEntry("actor_update", ("actor", "rollout", "advantages"), "actor"),
        ),
    )
    later = Outline(
        "ahead",
        (
            OutlineEntry("reward", ("prompts", read), rows=read),
            OutlineEntry("advantages", (read, "reward", "carry"), rows=read),
            OutlineEntry("rollout_ahead", ("actor", "prompts"), rows="rollout_ahead"),
            OutlineEntry("actor_update", ("actor", read, "advantages"), "actor"),
        ),
    )
    return Outlines({1: first, steps + 1: later})


AHEAD, TWO_AHEAD = steps_ahead(1), steps_ahead(2)


@dataclass(frozen=True)
class Made:
    """A stage whose record exists already."""

    name: str
    record: Record[Any]
    fingerprint: str = ""

    def run(self) -> Record[Any]:
        return self.record


@dataclass(frozen=True)
class RunOnDisk:
    """A run directory whose records are written one by one."""

    paths: RunPaths
    outlines: Outlines
    attempt: Attempt

    def commit(self, step: int, records: Mapping[str, Record[Any]]) -> None:
        """Commit records under the names of their stages."""
        run_stage = StageRunner(self.paths, self.attempt, Journal(self.paths, self.attempt), Stops()).at(step)
        for name, record in records.items():
            run_stage(Made(name, record))

    def save(self, step: int) -> None:
        """Save the actor's state of a step."""
        extra = {"journal_seq": 0, "ledger_bytes": 0, "healthy": True, "updates": step, "carry": {}}
        manifest = manifests.of_state("state/actor", State("actor", step, step, f"{step:064}"), extra, 1, {})
        folder = self.paths.state("actor", step)
        folder.parent.mkdir(parents=True, exist_ok=True)
        write = artifact.write_bytes({"weights": b"w"})
        artifact.commit(folder, write, manifest, self.attempt, lambda moment: None)


def on_disk(root: Path, outlines: Outline | Outlines, **facts: Any) -> RunOnDisk:
    """Create a run directory with these outlines."""
    outlines = outlines if isinstance(outlines, Outlines) else Outlines({1: outlines})
    resolved = {"steps": 9, STORIES: outlines.as_json(), **facts.pop("recipe", {})}
    paths = new_run_dir(root, resolved, **facts)
    return RunOnDisk(paths, outlines, claim(paths))


def score_of(seed: int) -> float:
    """Return the score of a sample."""
    return seed / 8


def rollouts(number: int, lengths: Sequence[int], *, step: int = 1) -> Rollouts:
    """Return two samples for each of the prompts p0, p1, ...; row r of round (or batch) n has the seed 100 n + r."""
    count, width = len(lengths), max(lengths)
    prompts = [f"p{row // 2}" for row in range(count)]
    sizes = [1 + row % 3 for row in range(count)]
    tokens = torch.tensor(
        [[1 + row + at if at < length else 0 for at in range(width)] for row, length in enumerate(lengths)],
        dtype=torch.int32,
    )
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    mask[0, 0] = False  # a hole
    return Rollouts(
        prompt_tokens=torch.tensor([number + row for row in range(count) for _ in range(sizes[row])]).int(),
        prompt_lengths=torch.tensor(sizes),
        tokens=tokens,
        lengths=torch.tensor(lengths),
        mask=mask,
        sampler_logprobs=torch.where(mask, -0.5, 0.0),
        finish=torch.tensor([row % 2 for row in range(count)]),
        seeds=torch.arange(count) + 100 * number,
        prompt_ids=prompts,
        sample_indices=[row % 2 for row in range(count)],
        texts=[f"seed {100 * number + row}" for row in range(count)],
        stamps=[f"actor@{step - 1}:abc"] * count,
        sends=[1] * count,
    )


def scores(of: Rollouts) -> torch.Tensor:
    """Return the score of each row."""
    return score_of(1) * of.seeds.float()


def rewards(of: Rollouts) -> Rewards:
    count = of.num_seqs
    return Rewards(scores(of), torch.zeros(count).long(), {}, [""] * count, [f"truth {each}" for each in of.texts])


def logprobs(of: Rollouts) -> Logprobs:
    """Return log-probs whose difference from the reference is a tenth of the score."""
    actor = torch.where(of.mask, -0.25, 0.0)
    return Logprobs("actor@0:abc", {}, actor=actor, reference=actor - of.mask * scores(of)[:, None] / 10)


def advantages(of: Rollouts) -> Advantages:
    """Return advantages of minus the score."""
    grid = -scores(of)[:, None] * of.mask
    return Advantages(
        advantages=grid, returns=grid * 2, token_rewards=grid * 3, mask=of.mask, carry_out={}, summary={}
    )


def update(step: int) -> Update:
    return Update("actor", step, f"{step - 1:064}", f"{step:064}", step, {"loss": [0.5]}, {})


def selection(places: Sequence[tuple[int, int]], rounds: Sequence[Rollouts], *, is_full: bool = True) -> Selection:
    """Return the selection of these (round, row) pairs."""
    return Selection(
        rounds=torch.tensor([number for number, _ in places], dtype=torch.int64),
        rows=torch.tensor([row for _, row in places], dtype=torch.int64),
        prompt_ids=[rounds[number - 1].prompt_ids[row] for number, row in places],
        sample_indices=[rounds[number - 1].sample_indices[row] for number, row in places],
        is_full=is_full,
        summary={},
    )


def a_round(number: int, of: Rollouts, kept: Selection) -> dict[str, Record[Any]]:
    """Return the records of one round by stage name."""
    suffix = "" if number == 1 else f".{number}"
    return {f"rollout{suffix}": of, f"reward{suffix}": rewards(of), f"keep{suffix}": kept}


def after_selection(step: int, kept: Selection, rounds: Sequence[Rollouts]) -> dict[str, Record[Any]]:
    """Return the records of the stages after the selection."""
    taken = take(kept, rounds)
    return {"logprobs": logprobs(taken), "advantages": advantages(taken), "actor_update": update(step)}


FIRST, SECOND = rollouts(1, [2, 1, 4, 3]), rollouts(2, [5, 2, 1, 6])
TO_CONTINUE = selection([(1, 2)], [FIRST], is_full=False)
"""Selection of round 1."""
KEPT = selection([(2, 3), (1, 2), (2, 3), (2, 0), (1, 1)], [FIRST, SECOND])
"""Selection of round 2: rows of both rounds in another order, one of them twice."""


def two_rounds(step: int = 1) -> dict[str, Record[Any]]:
    """Return the records of a step with two rounds."""
    return {
        **a_round(1, FIRST, TO_CONTINUE),
        **a_round(2, SECOND, KEPT),
        **after_selection(step, KEPT, [FIRST, SECOND]),
    }
