"""Terms of the actor's loss besides the clip: averages, the NLL of good responses, and sources of old log-probs."""

import math
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch

from ppoctl.algorithms.formulas.aggregation import SequenceMean, TokenMean
from ppoctl.algorithms.formulas.kl_coefficient import KlTarget
from ppoctl.algorithms.stages.actor_update import ActorUpdateStage, Entropy, NegativeLogLikelihood
from ppoctl.algorithms.stages.joint_update import JointUpdateStage
from ppoctl.algorithms.stages.logprobs import KlPenalty, LogprobsStage
from ppoctl.algorithms.stages.objective import LossInputs, Terms
from ppoctl.core.batch.records import Logprobs
from ppoctl.core.errors import NonFiniteError, RecipeError
from ppoctl.core.ports import Minibatch, MinibatchResult, OutputRequest, TokenOutputs
from stages import stub_models
from stages.test_updates import BOTH, IN_LOSS, STATES, actor_stage, objective_of, plan
from tolerance import EXACT, FLOAT32

SAMPLER = (stub_models.ACTOR - 0.25) * stub_models.MASK
ROLLOUTS = stub_models.rollouts(sampler_logprobs=SAMPLER)


def logprobs_of(source: str, *, with_reference: bool = False) -> tuple[Logprobs, dict[str, object]]:
    models = stub_models.Models()
    stage = LogprobsStage(
        cast(Any, models), OutputRequest(temperature=0.7), with_reference, fingerprint="", source=cast(Any, source)
    )
    return stage.run(STATES["actor"], ROLLOUTS), models.engine.calls


@pytest.mark.parametrize("source", ["sampler", "current"])
def test_sampler_or_current_logprobs_need_no_actor_forward_pass(source: str) -> None:
    found, requests = logprobs_of(source, with_reference=True)
    assert requests == {"reference": OutputRequest(temperature=0.7)}
    assert (found.entropy, found.gap, found.metrics()) == (None, {}, {})
    assert found.reference is not None
    assert (found.actor is None) == (source == "current")
    assert logprobs_of(source)[1] == {}


def test_sampler_logprobs_are_committed_unchanged() -> None:
    found, _ = logprobs_of("sampler")
    assert found.actor is not None
    EXACT.check(found.actor, SAMPLER)
    other = replace(found, actor=SAMPLER * 1.5)
    assert other.identity != found.identity


def test_non_finite_sampler_logprob_raises() -> None:
    models, broken = stub_models.Models(), SAMPLER.clone()
    broken[1, 2] = math.nan
    stage = LogprobsStage(cast(Any, models), OutputRequest(), with_reference=False, fingerprint="", source="sampler")
    with pytest.raises(NonFiniteError, match=r"log-prob of the sampler .*sequence 1, response token 2"):
        stage.run(STATES["actor"], stub_models.rollouts(sampler_logprobs=broken))


def test_full_kl_is_clamped_from_above() -> None:
    full = torch.tensor([[0.5, 3.0, 9.0], [0.25, 1.5, 2.0]])
    for clamp, nats, held in (
        (None, [[0.5, 3.0, 0.0], [0.25, 1.5, 2.0]], []),
        (1.5, [[0.5, 1.5, 0.0], [0.25, 1.5, 1.5]], [[0, 1], [1, 2]]),
    ):
        found = KlPenalty("loss", "full", 0.1, output_clamp=clamp).exact(full, stub_models.MASK)
        assert found.nats.tolist() == nats
        assert found.held.nonzero().tolist() == held


def current() -> Logprobs:
    return replace(stub_models.logprobs(), actor=None, entropy=None)


class EntropyTrainer(stub_models.Engine):
    """A trainer that returns entropies if requested: 1 in the first minibatch, 2 in the second."""

    def update(self, sequences: object, minibatches: list[Minibatch], objective: object) -> list[MinibatchResult]:
        assert cast(Terms, objective).request.entropy
        self.calls["objective"], self.first = objective, minibatches[0].rows
        return [
            MinibatchResult(0.0, 1.0, TokenOutputs(self.outputs[m.rows] + place, torch.full((1, 3), 1.0 + place)))
            for place, m in enumerate(minibatches)
        ]


def test_current_logprobs_give_ratio_of_one() -> None:
    objective = objective_of(actor_stage(models=cast(Any, stub_models.Models(EntropyTrainer()))), logprobs=current())
    outputs = (stub_models.ACTOR * 1.7 - 3).requires_grad_()
    loss = objective(BOTH, TokenOutputs(outputs), objective.totals(BOTH))
    loss.backward()  # type: ignore[no-untyped-call]
    # Minus the advantages 1, 2, -1, 0.5, 3 over five tokens.
    FLOAT32.check(loss.detach(), -5.5 / 5)
    assert outputs.grad is not None
    FLOAT32.check(outputs.grad, torch.tensor([[-1.0, -2.0, 0.0], [1.0, -0.5, -3.0]]) / 5)


@pytest.mark.parametrize("source", ["sampler", "current"])
def test_first_minibatch_supplies_metrics_without_forward_pass(source: str) -> None:
    engine = EntropyTrainer()
    stage = actor_stage(models=cast(Any, stub_models.Models(engine)), penalty=IN_LOSS)
    old = current() if source == "current" else replace(current(), actor=SAMPLER)
    advantages = stub_models.advantages(kl_coef=0.1)
    record = stage.run(STATES["actor"], ROLLOUTS, old, advantages)
    metrics, row = record.metrics(), engine.first.item()
    assert metrics["policy/entropy_mean"] == 1.0
    # The sampler's log-prob is 0.25 lower for each token, row by row.
    assert metrics["mismatch/gap_mean_abs"] == pytest.approx(0.25)
    assert record.identity == replace(record, gap={"gap_k3": 7.0}).identity
    # k2 of d = reference - actor: 0.5, -0.5 in row 0; 0, 0.5, -1 in row 1.
    mean = [0.125, (0.125 + 0.5) / 3][row]
    kl_metrics = {name: value for name, value in metrics.items() if name.startswith("kl/")}
    expected = {"kl/reference_mean": mean, "kl/clamped_frac": 0.0, "kl/coef": 0.1, "kl/penalty_mean": 0.1 * mean}
    assert kl_metrics == pytest.approx(expected if source == "current" else {})


def test_full_kl_is_read_before_update_if_it_was_computed() -> None:
    alone = KlPenalty("loss", "full", 0.1)
    followed = replace(alone, target=KlTarget(0.1, "token", 100))
    outputs = stub_models.logprobs(reference=None)
    assert alone.before_update(outputs, ROLLOUTS.mask) is None
    first = followed.before_update(replace(outputs, full_kl=torch.full((2, 3), 0.5)), ROLLOUTS.mask)
    assert first is not None
    EXACT.check(first.nats, 0.5 * stub_models.MASK)


def test_entropies_computed_by_trainer_are_not_requested_again() -> None:
    stage = actor_stage(plan=plan(epochs=2))
    record = stage.run(STATES["actor"], ROLLOUTS, stub_models.logprobs(), stub_models.advantages())
    assert record.gap is None
    assert not cast(Terms, cast(Any, stage.models).engine.calls["objective"]).request.entropy


@pytest.mark.parametrize("term", [NegativeLogLikelihood(), Entropy()], ids=["nll", "entropy"])
def test_loss_term_gradients_match_finite_differences(term: NegativeLogLikelihood | Entropy) -> None:
    """In float64, over masks with holes and an empty row; the entropy is differentiated through its distribution."""
    logits = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])

    def losses(logits: torch.Tensor) -> torch.Tensor:
        logp = logits.log_softmax(-1)
        token_outputs = TokenOutputs(logp[..., 2], -(logp.exp() * logp).sum(-1))
        return term(LossInputs(torch.arange(3), token_outputs.primary, token_outputs.entropy), mask)

    assert torch.autograd.gradcheck(losses, (logits,))
    assert not losses(logits)[~mask].any()


def test_positive_nll_averages_over_tokens_of_good_responses() -> None:
    for shaped, tokens, expected in (
        ([0.5, -1.0], 2, (0.5 + 2.5) / 2),
        ([1.0, 2.0], 5, (0.5 + 2.5 + 3 + 1 + 1.5) / 5),
    ):
        advantages = replace(stub_models.advantages(kl_coef=0.1), shaped=torch.tensor(shaped))
        # The average of the loss changes; the count of good tokens does not.
        stage = actor_stage(positive_nll_coef=0.2, aggregation=SequenceMean())
        objective = objective_of(stage, advantages=advantages)
        only = replace(objective, terms=[t for t in objective.terms if isinstance(t.loss, NegativeLogLikelihood)])
        assert only.totals(BOTH) == (tokens,)
        shares = [only(BOTH[[row]], TokenOutputs(stub_models.ACTOR[[row]]), (tokens,)) for row in (0, 1)]
        FLOAT32.check(shares[0] + shares[1], 0.2 * expected)


def test_loss_terms_are_reported_with_their_coefficients() -> None:
    stage = actor_stage(
        models=cast(Any, stub_models.Models(EntropyTrainer())),
        entropy_coef=0.3,
        positive_nll_coef=0.2,
        penalty=IN_LOSS,
    )
    advantages = replace(stub_models.advantages(kl_coef=0.1), shaped=torch.tensor([0.5, -1.0]))
    record = stage.run(STATES["actor"], ROLLOUTS, current(), advantages)
    metrics, first = record.metrics(), cast(Any, stage.models).engine.first.item()
    # Two minibatches of one row: minus the mean advantage, (1 + 2) / 2 and (-1 + 0.5 + 3) / 3.
    assert metrics["policy/surrogate_loss"] == pytest.approx(-(1.5 + 2.5 / 3) / 2)
    # The trainer returns entropies of 1, then of 2.
    assert metrics["policy/entropy_loss"] == pytest.approx(-0.3 * (1 + 2) / 2)
    # k2 of reference - actor: 0.5, -0.5 in row 0; 0, 0.5, -1 in row 1; 1 less in the second minibatch.
    differences = {0: [0.5, -0.5], 1: [0.0, 0.5, -1.0]}
    shifted = {row: [d - (row != first) for d in ds] for row, ds in differences.items()}
    means = [sum(d * d / 2 for d in ds) / len(ds) for ds in shifted.values()]
    assert metrics["policy/kl_loss"] == pytest.approx(0.1 * sum(means) / 2)
    # Only row 0 is good: log-probs -0.5 and -2.5, 1 more if it is second; nothing in the other minibatch.
    later = float(first != 0)
    assert metrics["policy/nll_loss"] == pytest.approx(0.2 * (0.5 + 2.5 - 2 * later) / 2 / 2)
    assert metrics["policy/nll_tokens"] == 2.0
    # They are not among the metrics that a replay compares: records of earlier versions do not have them.
    assert not [name for name in record.per_minibatch if name.endswith("_loss") or name == "nll_tokens"]


@pytest.mark.parametrize("shaped", [[0.0, -1.0], [-0.5, 0.0]])
def test_positive_nll_is_zero_without_good_responses(shaped: list[float]) -> None:
    advantages = replace(stub_models.advantages(kl_coef=0.1), shaped=torch.tensor(shaped))
    with_nll = objective_of(actor_stage(positive_nll_coef=0.2), advantages=advantages)
    without = objective_of(actor_stage(), advantages=advantages)
    assert with_nll.totals(BOTH) == (5, 0)
    EXACT.check(
        with_nll(BOTH, TokenOutputs(stub_models.ACTOR), (5, 0)), without(BOTH, TokenOutputs(stub_models.ACTOR), (5,))
    )


def test_positive_nll_without_recorded_shaped_rewards_raises() -> None:
    with pytest.raises(RecipeError, match="but an older version, which did not store it"):
        objective_of(actor_stage(positive_nll_coef=0.2), advantages=stub_models.advantages())


def test_reward_penalty_adds_no_kl_metrics_to_update() -> None:
    in_reward = KlPenalty(place="reward", estimator="k2", coef=0.1)
    stage = actor_stage(models=cast(Any, stub_models.Models(EntropyTrainer())), penalty=in_reward)
    old = replace(current(), actor=SAMPLER)
    metrics = stage.run(STATES["actor"], ROLLOUTS, old, stub_models.advantages()).metrics()
    assert not [name for name in metrics if name.startswith("kl/")]


def test_minibatch_that_trains_only_the_values_has_no_metric_of_the_policy() -> None:
    """The correction rejects the first row. Its value still counts, so both rows have an optimizer step."""
    mask = torch.tensor([[False] * 3, [True] * 3]) & stub_models.MASK
    settings = {field.name: getattr(actor_stage(), field.name) for field in fields(ActorUpdateStage)}
    stage = JointUpdateStage(
        **settings, value_clip=None, value_scale=0.5, value_coef=1.0, value_aggregation=TokenMean()
    )
    logprobs = replace(stub_models.logprobs(), values=torch.zeros(2, 3))
    correction = stub_models.correction(torch.ones(2, 3), mask)
    record = stage.run(STATES["actor"], stub_models.rollouts(), logprobs, stub_models.advantages(), correction)
    columns = record.per_minibatch
    assert {len(column) for column in columns.values()} == {2}
    clipped = columns["clip_frac"]
    assert sorted(value is None for value in clipped) == [False, True]
    assert None not in columns["loss"] + columns["grad_norm"] + columns["lr"]
    assert record.metrics()["policy/clip_frac"] == next(value for value in clipped if value is not None)
