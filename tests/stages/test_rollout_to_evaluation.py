"""Rollouts, log-probs, values, advantages and evaluations on hand-made records."""

import math
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from fakes.bigram import BigramTrainer
from fakes.components import EvenScorer, FakeStream
from fakes.job import Stops
from ppoctl.algorithms.estimators.gae import Gae
from ppoctl.algorithms.estimators.monte_carlo import MonteCarlo
from ppoctl.algorithms.formulas.kl_coefficient import KlTarget
from ppoctl.algorithms.stages.advantages import AdvantagesStage
from ppoctl.algorithms.stages.evaluation import EvaluateStage
from ppoctl.algorithms.stages.generation import OnProgress, SampleGeneration
from ppoctl.algorithms.stages.logprobs import KlPenalty, LogprobsStage
from ppoctl.algorithms.stages.rollout import RolloutStage, assemble, sample_requests
from ppoctl.algorithms.stages.values import ValuesStage
from ppoctl.core.batch.grid import pack
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import TERMINATED, TRUNCATED, Carry, State
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import NonFiniteError, PreemptedError, RewardError
from ppoctl.core.ports import OutputRequest, Sample, SampleRequest, SampleSetKey, SamplingParams, TokenOutputs
from stages import stub_models
from tolerance import EXACT, FLOAT32

ACTOR = State("actor", 0, 0, "first")
ROWS = (Prompt("a", (5,), "", "even"), Prompt("b", (6, 7), "", "even"))


def prompts(step: int = 1, answer: str = "even") -> Prompts:
    return Prompts(step, tuple(replace(row, answer=answer) for row in ROWS))


def test_every_sample_has_its_own_seed() -> None:
    requests = [request for step in (1, 2) for request in sample_requests(prompts(step), samples=2, seed=3)]
    assert len({request.seed for request in requests}) == len(requests) == 8
    assert [request.key for request in requests[:4]] == ["a#0", "a#1", "b#0", "b#1"]


def a_sample(key: str, *tokens: int, terminated: bool = True) -> Sample:
    return Sample(key, tokens, tuple(-float(token) for token in tokens), terminated, key, "")


def test_rollout_rows_follow_request_order() -> None:
    finished = [a_sample("b#0", 4, 4, 4, terminated=False), a_sample("a#0", 2, 1)]
    requests = sample_requests(prompts(), samples=1, seed=3)
    rollouts = assemble(prompts(), requests, {sample.key: sample for sample in finished}, samples=1)
    assert rollouts.texts == ["a#0", "b#0"]
    assert rollouts.tokens.tolist() == [[2, 1, 0], [4, 4, 4]]
    assert rollouts.finish.tolist() == [TERMINATED, TRUNCATED]
    assert rollouts.mask.tolist() == [[True, True, False], [True, True, True]]


class Recorder:
    """A generator that records its requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[float, SampleRequest]] = []

    def prepare(self, state: State) -> None:
        self.state = state

    def open(self, params: SamplingParams) -> FakeStream:
        def generate(request: SampleRequest) -> Sample:
            self.requests.append((params.temperature, request))
            return Sample(request.key, (2, 1), (0.0, 0.0), True, "2 1", self.state.stamp)

        return FakeStream(generate)

    def close(self) -> None:
        pass


@dataclass
class Keys:
    """The finished-samples port: records the fingerprints that it was called with."""

    finished: tuple[str, ...] = ("a#0", "b#0")
    seen: list[str] = field(default_factory=list)

    def load(self, sample_set: SampleSetKey) -> dict[str, Sample]:
        self.seen.append(sample_set.fingerprint)
        return {key: replace(a_sample(key, 2, 1), text="2 1") for key in self.finished}

    def writer(self, sample_set: SampleSetKey, *, to_the_end: bool = False) -> Any:
        assert sample_set.fingerprint == self.seen[-1]
        return nullcontext(lambda sample: None)


@dataclass
class Some:
    """The finished-samples port, with these samples."""

    finished: tuple[str, ...]

    def load(self, sample_set: SampleSetKey) -> dict[str, Sample]:
        return {key: replace(a_sample(key, 2, 1), text="2 1") for key in self.finished}

    def writer(self, sample_set: SampleSetKey, *, to_the_end: bool = False) -> Any:
        return nullcontext(lambda sample: None)


def unwatched(done: int, total: int, tokens: int) -> None:
    """Do nothing."""


def rollout_stage(
    finished: object, *, models: object = None, fingerprint: str = "", progress: OnProgress = unwatched
) -> RolloutStage:
    """Return the stage with this finished-samples port, one sample per prompt."""
    return RolloutStage(
        models=cast(Any, models or stub_models.Models()),
        generation=SampleGeneration(Recorder(), cast(Any, finished), Stops(), progress),
        params=SamplingParams(1.0, 4),
        samples_per_prompt=1,
        seed=3,
        fingerprint=fingerprint,
    )


class Replayed(stub_models.Models):
    """An actor that was replayed twice, inexactly."""

    num_calls = 0

    def stamped(self, state: State) -> State:
        self.num_calls += 1
        return replace(state, replay=2)


@pytest.mark.parametrize(
    ("finished", "stamps"), [(("a#0",), ["", "actor@0:first+r2"]), (("a#0", "b#0"), ["", ""])], ids=["one", "both"]
)
def test_new_samples_record_state_id_of_replayed_actor(finished: tuple[str, ...], stamps: list[str]) -> None:
    """The state id is not requested if no sample is missing: the request would load the actor for nothing."""
    models, progress = Replayed(), []
    stage = rollout_stage(Some(finished), models=models, progress=lambda *counts: progress.append(counts))
    assert stage.run(ACTOR, prompts()).stamps == stamps
    assert models.num_calls == 2 - len(finished)
    # Loaded samples count as done, but their tokens do not: they were not generated in this attempt.
    assert progress == ([(1, 2, 0), (2, 2, 2)] if len(finished) == 1 else [])


def test_finished_rollout_samples_are_keyed_by_actor_prompts_recipe() -> None:
    keys = Keys()

    def generate(state: State, step_prompts: Prompts, fingerprint: str) -> None:
        rollout_stage(keys, fingerprint=fingerprint).run(state, step_prompts)

    generate(ACTOR, prompts(), "keys")
    generate(ACTOR, prompts(), "keys")
    generate(State("actor", 0, 0, "second"), prompts(), "keys")
    generate(ACTOR, prompts(answer="odd"), "keys")
    generate(ACTOR, prompts(), "other keys")
    assert keys.seen[0] == keys.seen[1]
    assert len(set(keys.seen)) == 4


def test_rollout_of_loaded_samples_reports_zero_generation_time() -> None:
    stage = rollout_stage(Some(("a#0", "b#0")))
    assert stage.run(ACTOR, prompts()).drawing == (0, 0.0)


def test_logprobs_use_rollout_temperature_for_actor_and_reference() -> None:
    models = stub_models.Models()
    stage = LogprobsStage(
        cast(Any, models), scored=OutputRequest(temperature=0.7), with_reference=True, fingerprint=""
    )
    found = stage.run(ACTOR, stub_models.rollouts())
    assert models.engine.calls == {
        "actor": OutputRequest(temperature=0.7, entropy=True),
        "reference": OutputRequest(temperature=0.7),
    }
    EXACT.check(found.actor, stub_models.ACTOR)
    assert found.reference is not None
    EXACT.check(found.reference, stub_models.REFERENCE)
    without = LogprobsStage(
        cast(Any, models), scored=OutputRequest(temperature=0.7), with_reference=False, fingerprint=""
    )
    assert without.run(ACTOR, stub_models.rollouts()).reference is None


def test_one_call_computes_logprobs_of_actor_and_reference() -> None:
    models = stub_models.Models()
    stage = LogprobsStage(
        cast(Any, models),
        scored=OutputRequest(temperature=0.7, top_p=0.9),
        with_reference=True,
        in_one_pass=True,
        fingerprint="",
    )
    models.engine.reference[0, 2] = math.nan  # not in the mask
    found = stage.run(ACTOR, stub_models.rollouts())
    assert models.engine.calls == {"actor": OutputRequest(temperature=0.7, top_p=0.9, entropy=True, reference=True)}
    EXACT.check(found.actor, stub_models.ACTOR)
    assert found.reference is not None
    EXACT.check(found.reference, stub_models.REFERENCE)
    models.engine.reference[1, 2] = math.inf
    with pytest.raises(NonFiniteError, match=r"log-prob of the reference .*sequence 1, response token 2"):
        stage.run(ACTOR, stub_models.rollouts())


def test_one_call_and_two_calls_give_equal_records() -> None:
    trainer = BigramTrainer("actor")
    trainer.start()
    trainer.table += torch.arange(12.0) / 10
    scored = OutputRequest(temperature=0.7, top_p=0.9)
    one, two = (
        LogprobsStage(
            cast(Any, stub_models.Models(cast(Any, trainer))),
            scored,
            with_reference=True,
            in_one_pass=in_one_pass,
            fingerprint="",
        ).run(ACTOR, stub_models.rollouts())
        for in_one_pass in (True, False)
    )
    assert one.reference is not None
    assert two.reference is not None
    EXACT.check(one.reference, two.reference)
    assert one.actor is not None
    assert not torch.equal(one.reference, one.actor)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_outputs_raise_unless_masked(bad: float) -> None:
    engine = stub_models.Engine()
    models = cast(Any, stub_models.Models(engine))
    logprobs = LogprobsStage(models, scored=OutputRequest(), with_reference=True, fingerprint="")
    values = ValuesStage(models, truncated="terminal", fingerprint="")
    engine.outputs[0, 2] = engine.reference[0, 2] = bad
    assert float(values.run(ACTOR, stub_models.rollouts()).values[0, 2]) == 0.0
    found = logprobs.run(ACTOR, stub_models.rollouts())
    assert found.reference is not None
    assert (float(found.actor[0, 2]), float(found.reference[0, 2])) == (0.0, 0.0)
    engine.reference[1, 0] = bad
    with pytest.raises(NonFiniteError, match=r"log-prob of the reference .*sequence 1, response token 0"):
        logprobs.run(ACTOR, stub_models.rollouts())
    engine.outputs[1, 1:] = bad
    with pytest.raises(NonFiniteError, match=r"log-prob of the actor .*sequence 1, response token 1"):
        logprobs.run(ACTOR, stub_models.rollouts())
    with pytest.raises(NonFiniteError, match=r"value of the critic .*sequence 1, response token 1"):
        values.run(ACTOR, stub_models.rollouts())


def advantages(**changes: Any) -> AdvantagesStage:
    estimator = Gae(changes.pop("gamma", 1.0), lam := changes.pop("gae_lambda", 1.0), lam, None)
    keys = {
        "reward_steps": (),
        "estimator": estimator,
        "whitened": False,
        "truncated": "terminal",
        "penalty": None,
        "fingerprint": "",
    }
    return AdvantagesStage(**{**keys, **changes})


def gathered(value: float = 0.0, **logprobs: Any) -> tuple[Any, ...]:
    """Return the inputs of the advantages; the critic predicts `value` everywhere."""
    values = stub_models.values(torch.full((2, 3), value) * stub_models.MASK)
    return stub_models.rollouts(), stub_models.rewards(), values, stub_models.logprobs(**logprobs), Carry(0.0)


GATHERED = gathered()


def test_discounted_returns_and_advantages_by_hand() -> None:
    inputs = gathered(1.0)
    found = advantages(gamma=0.5).run(*inputs)
    FLOAT32.check(found.returns, torch.tensor([[0.5, 1.0, 0.0], [0.5, 1.0, 2.0]]))
    FLOAT32.check(found.advantages, torch.tensor([[-0.5, 0.0, 0.0], [-0.5, 0.0, 1.0]]))
    # lambda 0: r + gamma V' - V of each token alone.
    found = advantages(gamma=0.5, gae_lambda=0.0).run(*inputs)
    FLOAT32.check(found.advantages, torch.tensor([[-0.5, 0.0, 0.0], [-0.5, -0.5, 1.0]]))


def test_critic_returns_may_use_separate_lambda() -> None:
    inputs = gathered(1.0)
    # Row 0, policy (lambda 0): -V + V' = 0, 1 - 1 = 0. Critic (lambda 1): all returns are the reward.
    found = advantages(estimator=Gae(1.0, 0.0, 1.0, None)).run(*inputs)
    FLOAT32.check(found.advantages, torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    FLOAT32.check(found.returns, torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]]))
    # The two lambdas exchanged.
    found = advantages(estimator=Gae(1.0, 1.0, 0.0, None)).run(*inputs)
    FLOAT32.check(found.advantages, torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    FLOAT32.check(found.returns, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 2.0]]))


def test_length_adaptive_lambda_applies_only_to_policy() -> None:
    inputs = gathered(1.0)
    # alpha 1: lambda 1 - 1/2 and 1 - 1/3. Row 1: A2 = 2 - 1 = 1, A1 = 0 + 2/3, A0 = 4/9; row 0 has no error.
    found = advantages(estimator=Gae(1.0, 1.0, 1.0, 1.0)).run(*inputs)
    FLOAT32.check(found.advantages, torch.tensor([[0.0, 0.0, 0.0], [4 / 9, 2 / 3, 1.0]]))
    FLOAT32.check(found.returns, torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 2.0]]))
    assert found.metrics()["advantage/lambda_mean"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    # A response without a score has no lambda.
    unscored = (inputs[0], stub_models.rewards(0.0, 2.0, outcomes=(2, 0)), *inputs[2:])
    found = advantages(estimator=Gae(1.0, 1.0, 1.0, 1.0)).run(*unscored)
    assert found.metrics()["advantage/lambda_mean"] == pytest.approx(2 / 3)


def test_monte_carlo_ignores_critic_values() -> None:
    inputs = gathered(9.0)
    found = advantages(estimator=MonteCarlo(0.5)).run(*inputs)
    for grid in (found.advantages, found.returns):
        FLOAT32.check(grid, torch.tensor([[0.5, 1.0, 0.0], [0.5, 1.0, 2.0]]))


CUT = torch.tensor([0, 1])
"""The second response is truncated."""


@pytest.mark.parametrize(("estimator", "first"), [(Gae(0.5, 1.0, 1.0, None), -1.0), (MonteCarlo(0.5), 0.0)])
def test_return_of_truncated_response_includes_bootstrap_value(estimator: Any, first: float) -> None:
    values = replace(stub_models.values(torch.ones(2, 3) * stub_models.MASK), behind=torch.tensor([0.0, 8.0]))
    rollouts = stub_models.rollouts(finish=CUT)
    stage = advantages(estimator=estimator, truncated="bootstrap")
    found = stage.run(rollouts, stub_models.rewards(), values, stub_models.logprobs(), Carry(0.0))
    # Row 1: 2 + 8/2 = 6, 6/2 = 3, 3/2 = 1.5; row 0 has ended: 1, 1/2. Token rewards exclude the bootstrap value.
    returns = torch.tensor([[0.5, 1.0, 0.0], [1.5, 3.0, 6.0]])
    FLOAT32.check(found.returns, returns)
    FLOAT32.check(found.advantages, (returns + first) * stub_models.MASK)
    FLOAT32.check(found.token_rewards, torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
    assert found.metrics()["advantage/bootstrap_mean"] == 4.0


def test_bootstrap_value_is_added_at_last_token_of_short_response() -> None:
    values = replace(stub_models.values(), behind=torch.tensor([8.0, 0.0]))
    rollouts = stub_models.rollouts(finish=torch.tensor([1, 0]))
    stage = advantages(estimator=MonteCarlo(0.5), truncated="bootstrap")
    found = stage.run(rollouts, stub_models.rewards(), values, stub_models.logprobs(), Carry(0.0))
    # Row 0: 1 + 8/2 = 5 at its second and last token, 5/2 before.
    FLOAT32.check(found.returns, torch.tensor([[2.5, 5.0, 0.0], [0.5, 1.0, 2.0]]))


def test_truncated_response_without_score_is_not_bootstrapped() -> None:
    values = replace(stub_models.values(), behind=torch.tensor([0.0, 8.0]))
    rollouts, unscored = stub_models.rollouts(finish=CUT), stub_models.rewards(1.0, 0.0, outcomes=(0, 2))
    found = advantages(truncated="bootstrap").run(rollouts, unscored, values, stub_models.logprobs(), Carry(0.0))
    FLOAT32.check(found.returns, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert found.metrics()["advantage/bootstrap_mean"] == 0.0


def test_missing_bootstrap_values_raise() -> None:
    with pytest.raises(AssertionError, match="require bootstrap values, which were not computed"):
        advantages(truncated="bootstrap").run(*GATHERED)


def test_filter_masks_truncated_responses_in_advantages() -> None:
    penalty = KlPenalty(place="reward", estimator="k1", coef=0.1)
    cut = (stub_models.rollouts(finish=CUT), *GATHERED[1:])
    found = advantages(truncated="filter", whitened=True, penalty=penalty).run(*cut)
    assert found.mask.tolist() == [[True, True, False], [False, False, False]]
    for grid in (found.advantages, found.returns, found.token_rewards):
        assert grid[0].any()
        assert not grid[1].any()
    # Two tokens alone: mean 0, variance 1.
    whitened = found.advantages[0, :2]
    FLOAT32.check(torch.stack([whitened.sum(), whitened.std()]), torch.tensor([0.0, 1.0]))
    assert found.shaped is not None
    assert found.shaped.tolist() == [1.0, 2.0]
    assert (found.carry.trained_seqs, found.carry.trained_tokens) == (1, 2)
    metrics = found.metrics()
    assert metrics["advantage/filtered_frac"] == 0.5
    # k1 of row 0: 0.5 and -0.5.
    assert metrics["kl/reference_mean"] == pytest.approx(0.0)


def test_step_with_only_truncated_responses_raises() -> None:
    rollouts = stub_models.rollouts(finish=torch.tensor([1, 1]), stamps=["actor@4:x", "actor@4:x"])
    with pytest.raises(
        RewardError, match=r"all 2 scored responses that step 5 generated are truncated.*`filter`"
    ) as caught:
        advantages(truncated="filter").run(rollouts, *GATHERED[1:])
    assert (caught.value.exit_code, caught.value.hint) == (4, "ppoctl resume RUN --set ppo.truncated=terminal")


class TokenValuedCritic(stub_models.Engine):
    """A critic whose value of a state is the token before it; records the sequences that it was called with."""

    def values(self, sequences: Sequences) -> torch.Tensor:
        self.calls["sequences"] = sequences
        packed = pack(sequences, torch.arange(sequences.num_seqs))
        return packed.to_grid(packed.tokens[packed.read_at].float()) + 0.5


@pytest.mark.parametrize("cut", [[0, 0], [1, 0], [0, 1], [1, 1]])
def test_bootstrap_value_is_value_after_last_token(cut: list[int]) -> None:
    engine = TokenValuedCritic()
    rollouts = stub_models.rollouts(finish=torch.tensor(cut))
    stages = [ValuesStage(cast(Any, stub_models.Models(engine)), t, "") for t in ("terminal", "filter", "bootstrap")]
    plain, other, found = (stage.run(ACTOR, rollouts) for stage in stages)
    # Prompts 5 and 6, responses 2 1 and 3 4 1: the last token of both is 1.
    EXACT.check(plain.values, torch.tensor([[5.5, 2.5, 0.0], [6.5, 3.5, 4.5]]))
    assert plain.behind is other.behind is None
    EXACT.check(found.values, plain.values)
    assert found.behind is not None
    EXACT.check(found.behind, torch.tensor([1.5, 1.5]) * torch.tensor(cut))
    sequences = cast(Sequences, engine.calls["sequences"])
    assert sequences.lengths.tolist() == [2 + cut[0], 3 + cut[1]]
    assert sequences.tokens.shape[1] == 3 + cut[1]
    assert torch.equal(sequences.prompt_tokens, rollouts.prompt_tokens)


def test_non_finite_bootstrap_value_raises() -> None:
    engine = stub_models.Engine(outputs=torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, math.nan]]))
    stage = ValuesStage(cast(Any, stub_models.Models(engine)), "bootstrap", "")
    with pytest.raises(NonFiniteError, match=r"value of the critic .*sequence 1, response token 3"):
        stage.run(ACTOR, stub_models.rollouts(finish=torch.tensor([0, 1])))
    engine.outputs = torch.tensor([[1.0, 1.0, math.nan], [1.0, 1.0, 1.0]])
    assert stage.run(ACTOR, stub_models.rollouts(finish=torch.tensor([0, 0]))).behind is not None


def test_reward_penalty_is_subtracted_from_every_token() -> None:
    penalty = KlPenalty(place="reward", estimator="k1", coef=0.1)
    found = advantages(penalty=penalty).run(*GATHERED)
    # k1 = actor - reference: 0.5, -0.5; 0, 0.5, -1. The reward of the answer is at its last token.
    FLOAT32.check(found.token_rewards, torch.tensor([[-0.05, 1.05, 0.0], [0.0, -0.05, 2.1]]))
    assert found.carry == Carry(0.1, 2.0, 5.0, kl_first_coef=0.1)


def test_adaptive_kl_coefficient_applies_from_next_step() -> None:
    # |actor - reference|: 0.5, 0.5; 0, 0.5, 1. Per sequence 1 and 1.5, per token 0.5 and 0.5.
    fixed = KlPenalty(place="reward", estimator="abs", coef=0.1)
    for per, measured, target in (("sequence", 1.25, 1.0), ("token", 0.5, 0.45)):
        penalty = replace(fixed, target=KlTarget(target, per, 20))
        # The first step uses the recipe's coefficient, a later step that of its carry. Two sequences of a horizon of
        # 20.
        for carried, used in ((0.0, 0.1), (0.4, 0.4)):
            found = advantages(penalty=penalty).run(*GATHERED[:-1], Carry(carried))
            following = used * (1 + min(measured / target - 1, 0.2) * 2 / 20)
            assert found.carry.kl_coef == pytest.approx(following)
            assert found.penalty_coef == found.metrics()["kl/coef"] == used
            assert found.metrics()["kl/measured"] == pytest.approx(measured)
            FLOAT32.check(found.token_rewards[0], torch.tensor([-0.5 * used, 1 - 0.5 * used, 0.0]))
            assert found.carry.kl_first_coef == 0.1
        # The carried coefficient is used while the recipe's initial value is unchanged; a changed value restarts it.
        for began, used in ((0.0, 0.4), (0.1, 0.4), (0.3, 0.1)):
            found = advantages(penalty=penalty).run(*GATHERED[:-1], Carry(0.4, kl_first_coef=began))
            assert found.penalty_coef == used
    # It changes by the number of generated sequences, including unscored ones; only scored ones are measured.
    penalty = replace(fixed, target=KlTarget(1.0, "sequence", 20))
    unscored = (GATHERED[0], stub_models.rewards(0.0, 2.0, outcomes=(2, 0)), *GATHERED[2:-1], Carry())
    found = advantages(penalty=penalty).run(*unscored)
    assert found.metrics()["kl/measured"] == pytest.approx(1.5)
    assert found.carry.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 20))
    # A fixed coefficient is the recipe's, whatever the carry has.
    found = advantages(penalty=fixed).run(*GATHERED[:-1], Carry(0.4))
    assert (found.carry.kl_coef, found.kl_coef, found.penalty_coef) == (0.1, None, 0.1)
    assert "kl/measured" not in found.metrics()
    # A coefficient that a resume makes adaptive starts at the recipe's, whether or not the resume also changes it.
    for coef in (0.1, 0.3):
        adaptive = replace(fixed, coef=coef, target=KlTarget(1.0, "sequence", 20))
        assert advantages(penalty=adaptive).run(*GATHERED[:-1], found.carry).penalty_coef == coef


def test_trained_sequence_and_token_counts_accumulate() -> None:
    # Two tokens and three; without a score the second response is not trained on.
    for outcomes, seqs, tokens in (((0, 0), 2, 5), ((0, 2), 1, 2)):
        inputs = (GATHERED[0], stub_models.rewards(1.0, 0.0, outcomes=outcomes), *GATHERED[2:-1])
        found = advantages().run(*inputs, Carry(trained_seqs=7.0, trained_tokens=90.0))
        assert (found.carry.trained_seqs, found.carry.trained_tokens) == (7 + seqs, 90 + tokens)
        assert found.metrics()["trained/seqs"] == 7 + seqs
        assert found.metrics()["trained/tokens"] == 90 + tokens


def test_kl_penalty_without_reference_logprobs_raises() -> None:
    for place in ("reward", "loss"):
        penalty = KlPenalty(place=place, estimator="k2", coef=0.1)
        with pytest.raises(AssertionError, match="the reference's log-probs, which were not computed"):
            advantages(penalty=penalty).run(*gathered(reference=None))


def test_whitening_is_optional_and_reports_raw_metrics() -> None:
    FLOAT32.check(advantages().run(*GATHERED).advantages, torch.tensor([[1.0, 1, 0], [2, 2, 2]]))
    found = advantages(whitened=True).run(*GATHERED)
    whitened = found.advantages[stub_models.MASK]
    FLOAT32.check(torch.stack([whitened.mean(), whitened.std()]), torch.tensor([0.0, 1.0]))
    # These metrics describe the advantages before whitening: 1, 1, 2, 2, 2.
    raw = {name: found.metrics()[f"advantage/raw_{name}"] for name in ("mean", "std", "abs_max")}
    assert raw == pytest.approx({"mean": 1.6, "std": torch.tensor([1.0, 1, 2, 2, 2]).std().item(), "abs_max": 2.0})


def test_evaluation_has_one_greedy_pass_and_seeded_samples() -> None:
    generator = Recorder()
    stage = EvaluateStage(
        generation=SampleGeneration(generator, cast(Any, Some(())), Stops(), unwatched),
        scorer=EvenScorer(),
        sets={"held": Prompts(0, (*ROWS, Prompt("a#2", (5,), "", "even")))},
        sampled=SamplingParams(0.8, 4),
        samples_per_prompt=3,
        seed=3,
        fingerprint="",
    )
    record = stage.run(ACTOR)
    assert [temperature for temperature, _ in generator.requests] == [0.0] * 3 + [0.8] * 9
    assert len({request.seed for _, request in generator.requests}) == 12
    owners = [(name, index) for name in ("a", "b", "a#2") for index in range(3)]
    assert [(row["prompt_id"], row["sample"]) for row in record.rows[3:]] == owners


def evaluation(**changes: Any) -> EvaluateStage:
    """Return the evaluation of two sets with equal prompts, two samples each."""
    keys = {
        "generation": SampleGeneration(Recorder(), cast(Any, Some(())), Stops(), unwatched),
        "scorer": EvenScorer(),
        "sets": {name: prompts(step=0) for name in ("held", "far")},
        "sampled": SamplingParams(0.8, 4),
        "samples_per_prompt": 2,
        "seed": 3,
        "fingerprint": "keys",
    }
    return EvaluateStage(**{**keys, **changes})


def test_resumed_evaluation_generates_missing_and_scores_all() -> None:
    complete, progress = evaluation().run(ACTOR), []
    finished = ("held/greedy/a#0", "held/greedy/b#0", "far/sampled/b#1")
    generator = Recorder()
    drawing = SampleGeneration(generator, cast(Any, Some(finished)), Stops(), lambda *counts: progress.append(counts))
    assert evaluation(generation=drawing).run(ACTOR) == complete
    generated = {request.key for _, request in generator.requests}
    assert len(generated) == len(generator.requests) == 12 - 3
    assert not generated & {*finished}
    assert [done for done, _, _ in progress] == list(range(3, 13))
    assert progress[-1] == (12, 12, 9 * 2)


def test_complete_evaluation_does_not_prepare_generator() -> None:
    keys = [f"held/{mode}#0" for mode in ("greedy/a", "greedy/b", "sampled/a", "sampled/b")]
    generator = Recorder()
    drawing = SampleGeneration(generator, cast(Any, Some(tuple(keys))), Stops(), unwatched)
    record = evaluation(generation=drawing, sets={"held": prompts(step=0)}, samples_per_prompt=1).run(ACTOR)
    assert len(record.rows) == 4
    assert "state" not in vars(generator)


def test_finished_eval_samples_are_keyed_by_actor_sets_and_recipe() -> None:
    keys = Keys(finished=("held/greedy/a#0",))
    drawing = SampleGeneration(Recorder(), cast(Any, keys), Stops(), unwatched)
    others = {"held": prompts(step=0, answer="odd"), "far": prompts(step=0)}
    for changes in ({}, {}, {"fingerprint": "other keys"}, {"sets": others}, {"sets": {"held": prompts(step=0)}}):
        evaluation(**{"generation": drawing, **changes}).run(ACTOR)
    evaluation(generation=drawing).run(State("actor", 0, 0, "second"))
    assert keys.seen[0] == keys.seen[1]
    assert len(set(keys.seen)) == 5


def test_greedy_pass_uses_no_sampling_filters() -> None:
    class Params(Recorder):
        def open(self, params: SamplingParams) -> FakeStream:
            opened.append(params)
            return super().open(params)

    opened: list[SamplingParams] = []
    sampled = SamplingParams(0.8, 4, top_p=0.9, top_k=5, min_p=0.1, stop_strings=("x",))
    drawing = SampleGeneration(Params(), cast(Any, Some(())), Stops(), unwatched)
    evaluation(generation=drawing, sampled=sampled, sets={"held": prompts(step=0)}).run(ACTOR)
    assert opened == [SamplingParams(0.0, 4, stop_strings=("x",)), sampled]


def test_eval_rows_match_scores_of_their_requests() -> None:
    class Numbers(EvenScorer):
        """A scorer that gives the n-th request the score n."""

        count = 0

        def submit(self, request: ScoreRequest) -> Future[Score]:
            self.count += 1
            future: Future[Score] = Future()
            future.set_result(Score(float(self.count), "ok"))
            return future

    found = evaluation(scorer=Numbers(), sets={"held": prompts(step=0)}).run(ACTOR)
    assert [row["score"] for row in found.rows] == [1, 2, 1 + 2, 2 + 2, 3 + 2, 4 + 2]


def test_on_sample_receives_loaded_responses_first() -> None:
    scored: list[tuple[str, str]] = []
    stage = RolloutStage(
        models=cast(Any, stub_models.Models()),
        generation=SampleGeneration(Recorder(), cast(Any, Some(("b#0", "a#1"))), Stops(), unwatched),
        params=SamplingParams(1.0, 4),
        samples_per_prompt=2,
        seed=3,
        fingerprint="",
        on_sample=lambda prompt, sample: scored.append((prompt.id, sample.key)),
    )
    stage.run(ACTOR, prompts())
    assert scored == [("b", "b#0"), ("a", "a#1"), ("b", "b#1"), ("a", "a#0")]


def test_evaluation_stops_before_next_sample() -> None:
    generator, gate = Recorder(), Stops(when=lambda gate: gate.between_calls == 3)
    stage = evaluation(generation=SampleGeneration(generator, cast(Any, Some(())), gate, unwatched))
    with pytest.raises(PreemptedError):
        stage.run(ACTOR)
    assert len(generator.requests) == 3


def test_samples_finished_together_are_kept_together() -> None:
    """A stop between them would lose finished samples."""

    class Together(FakeStream):
        def finished(self) -> list[Sample]:
            return [self.generate(self.open.pop()) for _ in range(len(self.open))]

    class Pairs(Recorder):
        def open(self, params: SamplingParams) -> FakeStream:
            return Together(super().open(params).generate)

    kept: list[str] = []

    class Kept(Some):
        def writer(self, sample_set: SampleSetKey, *, to_the_end: bool = False) -> Any:
            return nullcontext(lambda sample: kept.append(sample.key))

    drawing = SampleGeneration(
        Pairs(), cast(Any, Kept(())), Stops(when=lambda gate: gate.between_calls == 1), unwatched
    )
    with pytest.raises(PreemptedError):
        evaluation(generation=drawing).run(ACTOR)
    assert kept == ["held/greedy/b#0", "held/greedy/a#0"]


def test_second_rollout_round_uses_different_seeds() -> None:
    sent: dict[str, list[SampleRequest]] = {}
    for name in ("rollout", "rollout.2"):
        stage = replace(rollout_stage(Some(())), name=name)
        stage.run(ACTOR, prompts())
        sent[name] = [request for _, request in cast(Recorder, stage.generation.generator).requests]
    first, second = sent.values()
    assert {request.seed for request in first} & {request.seed for request in second} == set()
    assert [request.key for request in first] == [request.key for request in second]


def test_full_kl_is_committed_masked_and_non_finite_raises() -> None:
    holed = torch.tensor([[True, False, False], [True, True, True]])

    class WithFullKl(stub_models.Engine):
        def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
            outputs = super().logprobs(sequences, request)
            return replace(outputs, full_kl=torch.tensor([[0.5, math.nan, math.inf], [0.25, 1.5, 2.0]]))

    models = cast(Any, stub_models.Models(WithFullKl()))
    stage = LogprobsStage(
        models, OutputRequest(), with_reference=False, with_full_kl=True, source="trainer", fingerprint=""
    )
    found = stage.run(ACTOR, stub_models.rollouts(mask=holed, sampler_logprobs=stub_models.ACTOR * holed))
    assert found.full_kl is not None
    assert found.full_kl.tolist() == [[0.5, 0.0, 0.0], [0.25, 1.5, 2.0]]
    with pytest.raises(NonFiniteError, match="a divergence from the reference"):
        stage.run(ACTOR, stub_models.rollouts())
