"""Rollouts, log-probs, values, advantages and evaluations on records made by hand."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from fakes.job import no_stop
from fakes.sockets import EvenScorer
from ppoctl.batch.prompts import Prompt, Prompts
from ppoctl.batch.records import TERMINATED, TRUNCATED, Carry, State
from ppoctl.errors import NonFiniteError
from ppoctl.ports import Sample, SampleRequest, SamplingParams
from ppoctl.stages.advantages import AdvantagesStage
from ppoctl.stages.evaluate import EvaluateStage
from ppoctl.stages.logprobs import KlPenalty, LogprobsStage
from ppoctl.stages.rollout import RolloutStage, assemble, sample_requests
from ppoctl.stages.values import ValuesStage
from stages import hand
from tolerance import EXACT, FLOAT32

ACTOR = State("actor", 0, 0, "first")
ROWS = (Prompt("a", (5,), "", "even"), Prompt("b", (6, 7), "", "even"))


def prompts(step: int = 1, answer: str = "even") -> Prompts:
    return Prompts(step, tuple(replace(row, answer=answer) for row in ROWS))


def test_each_sample_of_each_prompt_of_each_step_has_its_own_seed() -> None:
    requests = [request for step in (1, 2) for request in sample_requests(prompts(step), samples=2, seed=3)]
    assert len({request.seed for request in requests}) == len(requests) == 8
    assert [request.key for request in requests[:4]] == ["a#0", "a#1", "b#0", "b#1"]


def a_sample(key: str, *tokens: int, terminated: bool = True) -> Sample:
    return Sample(key, tokens, tuple(-float(token) for token in tokens), terminated, key, "")


def test_rows_stand_in_the_order_of_the_requests_whatever_finished_first() -> None:
    finished = [a_sample("b#0", 4, 4, 4, terminated=False), a_sample("a#0", 2, 1)]
    requests = sample_requests(prompts(), samples=1, seed=3)
    rollouts = assemble(prompts(), requests, {sample.key: sample for sample in finished}, samples=1)
    assert rollouts.texts == ["a#0", "b#0"]
    assert rollouts.tokens.tolist() == [[2, 1, 0], [4, 4, 4]]
    assert rollouts.finish.tolist() == [TERMINATED, TRUNCATED]
    assert rollouts.mask.tolist() == [[True, True, False], [True, True, True]]


class Recorder:
    """A generator that writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, SampleRequest]] = []

    def be_at(self, state: State) -> None:
        pass

    def generate(self, requests: Sequence[SampleRequest], params: SamplingParams, *, at: State) -> Iterator[Sample]:
        for request in reversed(requests):
            self.asked.append((params.temperature, request))
            yield Sample(request.key, (2, 1), (0.0, 0.0), True, "2 1", at.stamp)

    def close(self) -> None:
        pass


@dataclass
class Keys:
    """The parts port: writes down under which fingerprint it was asked."""

    seen: list[str] = field(default_factory=list)

    def recall(self, *, step: int, stage: str, fingerprint: str) -> dict[str, Sample]:
        self.seen.append(fingerprint)
        return {f"{row}#0": a_sample(f"{row}#0", 2, 1) for row in "ab"}

    def keep(self, *, step: int, stage: str, fingerprint: str) -> Any:
        assert fingerprint == self.seen[-1]
        return nullcontext(lambda sample: None)

    def drop(self, *, step: int) -> None:
        pass


@dataclass
class Some:
    """The parts port: these samples are there."""

    there: tuple[str, ...]

    def recall(self, *, step: int, stage: str, fingerprint: str) -> dict[str, Sample]:
        return {key: a_sample(key, 2, 1) for key in self.there}

    def keep(self, *, step: int, stage: str, fingerprint: str) -> Any:
        return nullcontext(lambda sample: None)

    def drop(self, *, step: int) -> None:
        pass


class Replayed(hand.Models):
    """An actor that was made again twice, inexactly."""

    asked = 0

    def stamped(self, state: State) -> State:
        self.asked += 1
        return replace(state, replay=2)


@pytest.mark.parametrize(
    ("there", "stamps"), [(("a#0",), ["", "actor@0:first+r2"]), (("a#0", "b#0"), ["", ""])], ids=["one", "both"]
)
def test_samples_say_how_often_their_actor_was_made_again(there: tuple[str, ...], stamps: list[str]) -> None:
    """And nobody asks where no sample is missing: it would bring an engine to the actor for nothing."""
    models, told = Replayed(), []
    stage = RolloutStage(
        models=cast(Any, models),
        generator=Recorder(),
        parts=cast(Any, Some(there)),
        params=SamplingParams(1.0, 4),
        samples_per_prompt=1,
        seed=3,
        fingerprint="",
        check_stop=lambda: None,
        progress=lambda *counts: told.append(counts),
    )
    assert stage.run(ACTOR, prompts()).stamps == stamps
    assert models.asked == 2 - len(there)
    # Recalled samples are done, and their tokens are not counted: nobody drew them now.
    assert told == ([(1, 2, 0), (2, 2, 2)] if len(there) == 1 else [])


def test_finished_samples_belong_to_one_actor_one_set_of_prompts_and_one_recipe() -> None:
    keys = Keys()

    def draw(state: State, asked: Prompts, fingerprint: str) -> None:
        stage = RolloutStage(
            models=cast(Any, hand.Models()),
            generator=Recorder(),
            parts=cast(Any, keys),
            params=SamplingParams(1.0, 4),
            samples_per_prompt=1,
            seed=3,
            fingerprint=fingerprint,
            check_stop=lambda: None,
            progress=lambda done, total, tokens: None,
        )
        stage.run(state, asked)

    draw(ACTOR, prompts(), "keys")
    draw(ACTOR, prompts(), "keys")
    draw(State("actor", 0, 0, "second"), prompts(), "keys")
    draw(ACTOR, prompts(answer="odd"), "keys")
    draw(ACTOR, prompts(), "other keys")
    assert keys.seen[0] == keys.seen[1]
    assert len(set(keys.seen)) == 4


def test_log_probs_are_taken_at_the_temperature_of_the_rollout_and_the_reference_is_another_model() -> None:
    models = hand.Models()
    stage = LogprobsStage(cast(Any, models), temperature=0.7, with_reference=True, fingerprint="")
    found = stage.run(ACTOR, hand.rollouts())
    assert models.engine.asked == {"temperature": 0.7, "reference temperature": 0.7}
    EXACT.check(found.actor, hand.ACTOR)
    assert found.reference is not None
    EXACT.check(found.reference, hand.REFERENCE)
    without = LogprobsStage(cast(Any, models), temperature=0.7, with_reference=False, fingerprint="")
    assert without.run(ACTOR, hand.rollouts()).reference is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_counted_number_that_is_none_stops_and_one_under_the_mask_does_not(bad: float) -> None:
    engine = hand.Engine()
    models = cast(Any, hand.Models(engine))
    logprobs = LogprobsStage(models, temperature=1.0, with_reference=True, fingerprint="")
    values = ValuesStage(models, fingerprint="")
    engine.outputs[0, 2] = engine.reference[0, 2] = bad
    assert float(values.run(ACTOR, hand.rollouts()).values[0, 2]) == 0.0
    found = logprobs.run(ACTOR, hand.rollouts())
    assert found.reference is not None
    assert (float(found.actor[0, 2]), float(found.reference[0, 2])) == (0.0, 0.0)
    engine.reference[1, 0] = bad
    with pytest.raises(NonFiniteError, match=r"log-prob of the reference .*sequence 1, response token 0"):
        logprobs.run(ACTOR, hand.rollouts())
    engine.outputs[1, 1:] = bad
    with pytest.raises(NonFiniteError, match=r"log-prob of the actor .*sequence 1, response token 1"):
        logprobs.run(ACTOR, hand.rollouts())
    with pytest.raises(NonFiniteError, match=r"value of the critic .*sequence 1, response token 1"):
        values.run(ACTOR, hand.rollouts())


def advantages(**changes: Any) -> AdvantagesStage:
    keys = {"gamma": 1.0, "gae_lambda": 1.0, "whitened": False, "penalty": None, "fingerprint": ""}
    return AdvantagesStage(**{**keys, **changes})


GATHERED = (hand.rollouts(), hand.rewards(), hand.values(), hand.logprobs(), Carry(0.0))


def test_returns_are_the_discounted_rewards_and_advantages_what_the_critic_missed() -> None:
    ones = torch.ones(2, 3) * hand.MASK
    inputs = (hand.rollouts(), hand.rewards(), hand.values(ones), hand.logprobs(), Carry(0.0))
    found = advantages(gamma=0.5).run(*inputs)
    FLOAT32.check(found.returns, torch.tensor([[0.5, 1.0, 0.0], [0.5, 1.0, 2.0]]))
    FLOAT32.check(found.advantages, torch.tensor([[-0.5, 0.0, 0.0], [-0.5, 0.0, 1.0]]))
    # lambda 0: r + gamma V' - V of each token alone.
    found = advantages(gamma=0.5, gae_lambda=0.0).run(*inputs)
    FLOAT32.check(found.advantages, torch.tensor([[-0.5, 0.0, 0.0], [-0.5, -0.5, 1.0]]))


def test_a_penalty_in_the_reward_is_subtracted_from_every_token() -> None:
    penalty = KlPenalty(place="reward", estimator="k1", coef=0.1)
    found = advantages(penalty=penalty).run(*GATHERED)
    # k1 = actor - reference: 0.5, -0.5; 0, 0.5, -1. The reward of the answer stands at its last token.
    FLOAT32.check(found.token_rewards, torch.tensor([[-0.05, 1.05, 0.0], [0.0, -0.05, 2.1]]))
    assert found.carry == Carry(0.1)


def test_a_penalty_in_the_loss_is_not_in_the_reward() -> None:
    penalty = KlPenalty(place="loss", estimator="k2", coef=0.1)
    found = advantages(penalty=penalty).run(*GATHERED)
    FLOAT32.check(found.token_rewards, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    assert (found.carry, advantages().run(*GATHERED).carry) == (Carry(0.1), Carry(0.0))


def test_a_penalty_without_a_reference_is_no_step_without_a_penalty() -> None:
    gathered = (hand.rollouts(), hand.rewards(), hand.values(), hand.logprobs(reference=None), Carry(0.0))
    for place in ("reward", "loss"):
        penalty = KlPenalty(place=place, estimator="k2", coef=0.1)
        with pytest.raises(AssertionError, match="the reference's log-probs were not taken"):
            advantages(penalty=penalty).run(*gathered)


def test_whitening_is_a_choice() -> None:
    FLOAT32.check(advantages().run(*GATHERED).advantages, torch.tensor([[1.0, 1, 0], [2, 2, 2]]))
    whitened = advantages(whitened=True).run(*GATHERED).advantages[hand.MASK]
    FLOAT32.check(torch.stack([whitened.mean(), whitened.std()]), torch.tensor([0.0, 1.0]))


def test_an_evaluation_is_greedy_once_and_sampled_with_seeds_of_its_own() -> None:
    generator = Recorder()
    stage = EvaluateStage(
        generator=generator,
        scorer=EvenScorer(),
        sets={"held": Prompts(0, (*ROWS, Prompt("a#2", (5,), "", "even")))},
        sampled=SamplingParams(0.8, 4),
        samples_per_prompt=3,
        seed=3,
        fingerprint="",
        between=no_stop,
    )
    record = stage.run(ACTOR)
    assert [temperature for temperature, _ in generator.asked] == [0.0] * 3 + [0.8] * 9
    assert len({request.seed for _, request in generator.asked}) == 12
    owners = [(name, index) for name in ("a", "b", "a#2") for index in range(3)]
    assert [(row["prompt_id"], row["sample"]) for row in record.rows[3:]] == owners


def test_two_rounds_of_one_step_draw_with_other_seeds() -> None:
    first, second = (sample_requests(prompts(), samples=2, seed=3, stage=name) for name in ("rollout", "rollout.2"))
    assert {request.seed for request in first} & {request.seed for request in second} == set()
    assert [request.key for request in first] == [request.key for request in second]
