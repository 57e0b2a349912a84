"""Seeds and keys of generation and resampling, of which each test changes one part at a time: equal samples must not
occur twice in a run, and samples of another request must not be reused."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ppoctl.algorithms.formulas.resampling import max_random_weights
from ppoctl.algorithms.stages.episode_runner import EpisodeState, Observed
from ppoctl.algorithms.stages.evaluation import EvaluateStage
from ppoctl.algorithms.stages.resample import ResampleStage
from ppoctl.algorithms.stages.rollout import RolloutStage, sample_requests
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import Advantages, State
from ppoctl.core.ports import SampleRequest, SampleSetKey, SamplingParams
from ppoctl.data.order import Order, SourceShare
from stages.test_episodes import LIMITS, OPENED, PARAMS, REQUEST, says, turn
from stages.test_keep_groups import round_of

ACTOR = State("actor", 6, 11, "lineage")
ROWS = tuple(Prompt(name, (5, 6), f"question {name}", "even") for name in "ab")
OTHER = (replace(ROWS[0], text="another question"), ROWS[1])


def require_other(base: Mapping[str, Any], changes: Mapping[str, Any], of: Callable[..., Any]) -> None:
    """Raise AssertionError unless the result is the same again, and another one with each change alone."""
    found = of(**base)
    assert of(**base) == found
    results = {name: of(**{**base, name: value}) for name, value in changes.items()}
    assert [name for name, result in results.items() if result == found] == []
    assert len({str(result) for result in results.values()}) == len(changes), "two changes have the same effect"


def test_seed_of_a_sample_has_the_run_the_step_the_stage_the_prompt_and_the_index() -> None:
    def seeds(seed: int, step: int, stage: str, rows: tuple[Prompt, ...]) -> list[int]:
        return [request.seed for request in sample_requests(Prompts(step, rows), samples=3, seed=seed, stage=stage)]

    renamed = tuple(replace(row, id=row.id * 2) for row in ROWS)
    base = {"seed": 3, "step": 5, "stage": "rollout", "rows": ROWS}
    require_other(base, {"seed": 4, "step": 6, "stage": "rollout.2", "rows": renamed}, seeds)
    found = [seeds(**{**base, name: value}) for name, value in {"seed": 4, "step": 6, "stage": "rollout.2"}.items()]
    every = [seed for each in (seeds(**base), *found) for seed in each]
    assert len(set(every)) == len(every)


def test_each_turn_has_a_seed_of_its_own_that_follows_from_the_episode() -> None:
    def seeds(seed: int) -> list[int]:
        state, found = EpisodeState(replace(REQUEST, seed=seed), PARAMS, replace(LIMITS, turns=5)), []
        state.take(OPENED)
        for number in range(1, 6):
            request = state.action
            assert isinstance(request, SampleRequest)
            found.append(request.seed)
            state.take(turn(number, 4, 1))
            state.take(Observed(says("more"), (3,)))
        return found

    first, other = seeds(7), seeds(8)
    assert first[0] == 7
    assert first == seeds(7)
    assert len({*first, *other}) == 10


def test_sampled_rows_follow_from_the_run_the_step_and_the_stage() -> None:
    rollouts, _ = round_of("abcdefgh", [1.0, 0.0, 0.5] * 8, [2] * 24)
    grid = torch.zeros(rollouts.tokens.shape)
    advantages = Advantages(
        advantages=grid, returns=grid, token_rewards=grid, mask=rollouts.mask, carry_out={}, summary={},
        shaped=torch.arange(24.0),
    )  # fmt: skip

    def rows(seed: int, step: int, name: str) -> list[int]:
        of_step = replace(rollouts, stamps=[f"actor@{step - 1}:abc"] * 24)
        return ResampleStage(max_random_weights, seed, "keys", name).run(of_step, advantages).rows.tolist()

    base = {"seed": 3, "step": 7, "name": "resample"}
    require_other(base, {"seed": 4, "step": 8, "name": "resample.2"}, rows)


class NamedSet(Exception):  # noqa: N818 - ends a stage, and is not an error
    """Raised with the key of the samples that a stage would load or generate."""


class Naming:
    """A generation that only looks at the key of its samples."""

    def run(self, batches: Any, key: SampleSetKey, *_: Any) -> Iterator[Any]:
        raise NamedSet(key)


def key_of(stage: Any, *inputs: Any) -> SampleSetKey:
    with pytest.raises(NamedSet) as named:
        stage.run(*inputs)
    key = named.value.args[0]
    assert isinstance(key, SampleSetKey)
    return key


def test_kept_samples_of_a_rollout_have_its_actor_prompts_and_settings() -> None:
    def key(actor: State, rows: tuple[Prompt, ...], fingerprint: str, step: int, name: str) -> SampleSetKey:
        stage = RolloutStage(None, Naming(), SamplingParams(1.0, 4), 2, 3, fingerprint, name=name)  # type: ignore[arg-type]
        return key_of(stage, actor, Prompts(step, rows))

    base = {"actor": ACTOR, "rows": ROWS, "fingerprint": "keys", "step": 7, "name": "rollout"}
    changes = {"actor": replace(ACTOR, lineage="other"), "rows": OTHER, "fingerprint": "other", "step": 8}
    require_other(base, {**changes, "name": "rollout.2"}, key)


def test_kept_samples_of_an_evaluation_have_its_actor_sets_and_settings() -> None:
    def key(actor: State, sets: dict[str, tuple[Prompt, ...]], fingerprint: str) -> SampleSetKey:
        prompts = {name: Prompts(0, rows) for name, rows in sets.items()}
        stage = EvaluateStage(Naming(), None, prompts, SamplingParams(1.0, 4), 2, 3, fingerprint)  # type: ignore[arg-type]
        return key_of(stage, actor)

    base = {"actor": ACTOR, "sets": {"held": ROWS}, "fingerprint": "keys"}
    require_other(base, {"actor": replace(ACTOR, lineage="other"), "sets": {"held": OTHER}, "fingerprint": "b"}, key)
    require_other(base, {"actor": replace(ACTOR, step=7), "sets": {"far": ROWS}}, key)


def test_order_of_rows_follows_from_the_seed_the_epoch_the_source_and_the_repetition() -> None:
    def order(seed: int, epoch: int, shares: tuple[SourceShare, ...]) -> list[int]:
        rows = Order(shares, seed)
        return [rows.row(epoch * rows.epoch_rows + number) for number in range(rows.epoch_rows)]

    plain = (SourceShare(40),)
    require_other({"seed": 3, "epoch": 0}, {"seed": 4, "epoch": 1}, partial(order, shares=plain))
    # Half of a source is in each epoch: two epochs are one repetition of the source.
    half = (SourceShare(40, 0.5), SourceShare(40, 0.5))
    taken = [order(3, epoch, half) for epoch in range(4)]
    of_first, of_second = ([{row % 40 for row in rows if row // 40 == part} for rows in taken] for part in (0, 1))
    for chosen in (of_first, of_second):
        assert chosen[0] | chosen[1] == chosen[2] | chosen[3] == set(range(40))
        assert chosen[0] not in (chosen[2], chosen[3])
    assert all(one != other for one, other in zip(of_first, of_second, strict=True))
