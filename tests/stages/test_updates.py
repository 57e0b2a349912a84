"""The losses of both updates by hand, and the inputs of their lineage."""

import hashlib
import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from ppoctl.algorithms.formulas.aggregation import TokenMean
from ppoctl.algorithms.formulas.importance import (
    inside_weights,
    kept_by_ratio,
    normalized,
    plain_weights,
    truncated_sequence_weights,
    truncated_weights,
)
from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.formulas.policy_loss import PolicyClip, Reinforce
from ppoctl.algorithms.stages.actor_update import ActorUpdateStage, Surrogate
from ppoctl.algorithms.stages.correction import CorrectionStage
from ppoctl.algorithms.stages.critic_update import CriticUpdateStage
from ppoctl.algorithms.stages.logprobs import KlPenalty
from ppoctl.algorithms.stages.objective import Terms
from ppoctl.algorithms.stages.updates import MinibatchPlan, OptimizerSchedule
from ppoctl.core.batch.records import State
from ppoctl.core.errors import MismatchError, NonFiniteError
from ppoctl.core.ports import Minibatch, MinibatchResult, OptimizerStep, OutputRequest, TokenOutputs
from stages import stub_models
from tolerance import FLOAT32

CLIP = PolicyClip(0.2, 0.2, None)
IN_LOSS = KlPenalty(place="loss", estimator="k2", coef=0.1)
TIS = CorrectionStage(partial(truncated_weights, min_ratio=0.0, max_ratio=3.0), True, (), None, "keys")
BOTH = torch.tensor([0, 1])
STATES = {role: State(role, 4, 9, "parent") for role in ("actor", "critic")}


def plan(*, epochs: int = 1) -> MinibatchPlan:
    rates = OptimizerSchedule(LearningRate(1.0, "linear", 0, 20, 0.0), OptimizerStep(1.0, 0.0, 1.0, 0.9, 0.95, 1e-8))
    return MinibatchPlan(epochs, 1, 7, rates)


def actor_stage(**changes: Any) -> ActorUpdateStage:
    stage = ActorUpdateStage(
        models=cast(Any, stub_models.Models()),
        plan=plan(),
        scored=OutputRequest(temperature=0.7),
        loss=CLIP,
        aggregation=TokenMean(),
        entropy_coef=0.0,
        positive_nll_coef=0.0,
        penalty=None,
        fingerprint="keys",
    )
    return replace(stage, **changes)


def critic_stage(**changes: Any) -> CriticUpdateStage:
    models = cast(Any, stub_models.Models())
    stage = CriticUpdateStage(
        models=models, plan=plan(), clip=None, scale=0.5, aggregation=TokenMean(), fingerprint="keys"
    )
    return replace(stage, **changes)


def objective_of(stage: ActorUpdateStage, **changes: Any) -> Terms:
    inputs = {
        "rollouts": stub_models.rollouts(),
        "logprobs": stub_models.logprobs(),
        "advantages": stub_models.advantages(kl_coef=0.1),
    }
    stage.run(STATES["actor"], **(inputs | changes))
    return recorded_objective(stage)


def recorded_objective(stage: ActorUpdateStage | CriticUpdateStage) -> Terms:
    return cast(Terms, cast(stub_models.Models, stage.models).engine.calls["objective"])


def losses_of(objective: Terms) -> list[type]:
    return [type(term.loss) for term in objective.terms]


def test_policy_loss_of_rows_uses_global_token_count() -> None:
    objective = objective_of(actor_stage())
    # With unchanged log-probs the ratio is 1: minus the advantages. Row 1: -(-1 + 0.5 + 3) / 5; row 0: -(1 + 2) / 5.
    FLOAT32.check(objective(torch.tensor([1]), TokenOutputs(stub_models.ACTOR[[1]]), (5,)), -0.5)
    FLOAT32.check(objective(torch.tensor([0]), TokenOutputs(stub_models.ACTOR[[0]]), (5,)), -0.6)
    moved = stub_models.ACTOR[[1]] + torch.tensor([[0.1, 0.0, 0.0]])
    FLOAT32.check(objective(torch.tensor([1]), TokenOutputs(moved), (5,)), (math.exp(0.1) - 0.5 - 3) / 5)


def test_entropy_bonus_and_kl_penalty_are_added_to_loss() -> None:
    stage = actor_stage(entropy_coef=0.3, penalty=IN_LOSS)
    entropy = torch.tensor([[1.0, 2.0, 50.0], [0.0, 1.0, 1.0]])
    # k2 = d^2 / 2 of d = 0.5, -0.5; 0, 0.5, -1: 0.125 * 2 + 0 + 0.125 + 0.5 = 0.875.
    masked = stub_models.ACTOR.clone()
    masked[0, 2] = 77.0
    expected = -(1 + 2 - 1 + 0.5 + 3) / 5 - 0.3 * 5 / 5 + 0.1 * 0.875 / 5
    objective = objective_of(stage)
    assert objective.totals(BOTH) == (5, 5, 5)
    assert objective.totals(BOTH[:1]) == (2, 2, 2)
    FLOAT32.check(objective(BOTH, TokenOutputs(masked, entropy), (5, 5, 5)), expected)
    # Each term is divided by its own total.
    apart = -(1 + 2 - 1 + 0.5 + 3) / 4 - 0.3 * 5 / 8 + 0.1 * 0.875 / 2
    FLOAT32.check(objective(BOTH, TokenOutputs(masked, entropy), (4, 8, 2)), apart)


def test_loss_penalty_uses_coefficient_of_its_step() -> None:
    adapting = replace(stub_models.advantages(kl_coef=0.7), kl_coef=0.1)
    for found in (adapting, stub_models.advantages(kl_coef=0.1)):
        terms = objective_of(actor_stage(penalty=IN_LOSS), advantages=found).terms
        assert [term.coef for term in terms] == [1.0, 0.1]


def test_entropy_bonus_without_entropies_raises() -> None:
    assert not objective_of(actor_stage()).request.entropy
    rewarded = objective_of(actor_stage(entropy_coef=0.3))
    assert rewarded.request.entropy
    with pytest.raises(AssertionError, match="requires entropies, which were not computed"):
        rewarded(BOTH, TokenOutputs(stub_models.ACTOR), (5, 5))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_losses_and_gradients_ignore_masked_garbage(garbage: float) -> None:
    kept = stub_models.MASK & torch.tensor([[True, False, False], [True, True, False]])
    ones = torch.ones(2, 3)
    actor = objective_of(
        actor_stage(entropy_coef=0.3, penalty=IN_LOSS), correction=stub_models.correction(ones, kept)
    )
    critic = critic_stage(clip=0.1)
    advantages = replace(stub_models.advantages(), mask=kept, **{
        name: getattr(stub_models.advantages(), name) * kept for name in ("advantages", "returns", "token_rewards")
    })  # fmt: skip
    critic.run(STATES["critic"], stub_models.rollouts(), stub_models.values(), advantages)
    for objective, entropy in ((actor, ones), (recorded_objective(critic), None)):
        found = []
        for under in (7.0, garbage):
            outputs = stub_models.ACTOR.where(kept, under).requires_grad_()
            of_rows = None if entropy is None else entropy.where(kept, under)
            loss = objective(BOTH, TokenOutputs(outputs, of_rows), objective.totals(BOTH))
            loss.backward()  # type: ignore[no-untyped-call]
            assert outputs.grad is not None
            found.append((loss.item(), outputs.grad.tolist()))
        assert found[0] == found[1]
    assert not recorded_objective(critic).request.entropy


def test_loss_penalty_without_reference_logprobs_raises() -> None:
    without = stub_models.logprobs(reference=None)
    with pytest.raises(AssertionError, match="the reference's log-probs, which were not computed"):
        objective_of(actor_stage(penalty=IN_LOSS), logprobs=without)
    assert losses_of(objective_of(actor_stage(), logprobs=without)) == [Surrogate]


def test_unscored_rows_contribute_nothing_to_loss() -> None:
    advantages, second = stub_models.advantages(), stub_models.MASK & torch.tensor([[False], [True]])
    grids = {name: getattr(advantages, name) * second for name in ("advantages", "returns", "token_rewards")}
    only_second = replace(advantages, mask=second, **grids)
    # Entropies 7 in the row without a score, 1 in the other.
    entropy = torch.tensor([[7.0], [1.0]]).expand(2, 3).contiguous()
    objective = objective_of(actor_stage(entropy_coef=0.3), advantages=only_second)
    assert objective.totals(BOTH) == (3, 3)
    assert objective.totals(BOTH[:1]) == (0, 0)
    FLOAT32.check(objective(BOTH, TokenOutputs(stub_models.ACTOR, entropy), (3, 3)), -2.5 / 3 - 0.3)


def test_correction_weight_is_ratio_up_to_maximum() -> None:
    found = corrected((), weigh=TIS.weigh, bounded=True)
    FLOAT32.check(found.weights, torch.tensor([[1.5, 3.0, 0.0], [1.0, 0.5, 2.0]]))
    assert torch.equal(found.mask, stub_models.MASK)
    assert found.metrics() == pytest.approx({"correction/weight_mean": 8 / 5, "correction/capped_frac": 1 / 5})


def test_correction_weighs_advantages_and_masks_rejected_tokens() -> None:
    kept = stub_models.MASK & torch.tensor([[True, False, False], [True, True, True]])
    corrected = objective_of(actor_stage(), correction=stub_models.correction(torch.full((2, 3), 1.5), kept))
    # Row 0: -1 x 1.5; its second token is masked out.
    assert corrected.totals(BOTH) == (4,)
    FLOAT32.check(corrected(BOTH[:1], TokenOutputs(stub_models.ACTOR[:1]), (4,)), -1.5 / 4)


def corrected(keeps: Any, *, weigh: Any = plain_weights, normalize: Any = None, bounded: bool = False) -> Any:
    """Return the correction of ratios 1.5, 4; 1, 0.5, 2. By default a kept token's weight is its ratio."""
    gap = torch.tensor([[math.log(1.5), math.log(4), 0.0], [0.0, -math.log(2), math.log(2)]])
    rollouts = stub_models.rollouts(
        sampler_logprobs=(stub_models.ACTOR - gap) * stub_models.MASK, stamps=["actor@4:a"] * 2
    )
    return CorrectionStage(weigh, bounded, keeps, normalize, "keys").run(rollouts, stub_models.logprobs())


def test_token_is_in_loss_only_if_all_rejection_tests_pass() -> None:
    below = partial(kept_by_ratio, level="token", min_ratio=None, max_ratio=3.0)
    above = partial(kept_by_ratio, level="token", min_ratio=0.8, max_ratio=None)
    found = corrected((below, above))
    assert found.mask.tolist() == [[True, False, False], [True, False, True]]
    FLOAT32.check(found.weights, torch.tensor([[1.5, 0.0, 0.0], [1.0, 0.0, 2.0]]))
    metrics = {"weight_mean": 4.5 / 3, "rejected_frac": 2 / 5, "dropped_seqs": 0.0}
    assert found.metrics() == pytest.approx({f"correction/{name}": value for name, value in metrics.items()})


def test_sequence_rejection_sees_all_tokens_of_sequence() -> None:
    """Otherwise the second check would see only the tokens that the first one kept."""
    token = partial(kept_by_ratio, level="token", min_ratio=None, max_ratio=3.0)
    whole = partial(kept_by_ratio, level="sequence_sum", min_ratio=None, max_ratio=5.0)
    for keeps in ((token, whole), (whole, token)):
        found = corrected(keeps)
        assert found.mask.tolist() == [[False] * 3, [True] * 3]
        assert found.metrics()["correction/dropped_seqs"] == 1.0


def test_fully_masked_response_is_not_counted_as_dropped() -> None:
    mask = stub_models.MASK & torch.tensor([[False], [True]])
    below = partial(kept_by_ratio, level="token", min_ratio=None, max_ratio=3.0)
    stage = CorrectionStage(plain_weights, False, (below,), None, "keys")
    found = stage.run(
        stub_models.rollouts(mask=mask, sampler_logprobs=stub_models.ACTOR * mask), stub_models.logprobs()
    )
    assert found.metrics()["correction/dropped_seqs"] == 0.0


def test_weights_are_normalized_over_kept_tokens_or_before_rejection() -> None:
    whole = partial(kept_by_ratio, level="sequence_sum", min_ratio=None, max_ratio=5.0)
    for over, mean in (("tokens", 9 / 5), ("sequences", (5.5 / 2 + 3.5 / 3) / 2)):
        found = corrected((whole,), normalize=partial(normalized, over=over))
        FLOAT32.check(found.weights, torch.tensor([[0.0] * 3, [1.0, 0.5, 2.0]]) / mean)
    found = corrected((whole,), normalize=partial(normalized, over="kept_tokens"))
    # 1, 0.5, 2 have the mean 3.5 / 3.
    FLOAT32.check(found.weights[1], torch.tensor([1.0, 0.5, 2.0]) * 3 / 3.5)
    assert found.metrics()["correction/weight_mean"] == pytest.approx(1.0)


def test_correction_that_rejects_all_tokens_raises() -> None:
    nothing = partial(kept_by_ratio, level="token", min_ratio=None, max_ratio=0.1)
    with pytest.raises(MismatchError, match=r"leaves `0` of the 5 tokens that step 5 generated") as raised:
        corrected((nothing,))
    assert (raised.value.exit_code, str(raised.value.hint).startswith("ppoctl status")) == (5, True)
    # All tokens are in the loss, and all weights are 0.
    weighs_nothing = replace(TIS, weigh=partial(inside_weights, min_ratio=8.0, max_ratio=9.0))
    with pytest.raises(MismatchError, match="leaves `0` of the 5 tokens"):
        weighs_nothing.run(stub_models.rollouts(stamps=["actor@4:a"] * 2), stub_models.logprobs())
    # The row that is kept has no score.
    kept = torch.tensor([[True, True, False], [False, False, False]])
    unscored = replace(
        stub_models.advantages(torch.zeros(2, 3)), mask=~kept & stub_models.MASK, returns=torch.zeros(2, 3)
    )
    with pytest.raises(MismatchError, match=r"leaves `0` of the 3 tokens that have an advantage"):
        objective_of(actor_stage(), advantages=unscored, correction=stub_models.correction(torch.ones(2, 3), kept))


def test_sequence_weight_uses_ratios_of_rejected_tokens() -> None:
    above = partial(kept_by_ratio, level="token", min_ratio=0.8, max_ratio=None)
    weigh = partial(truncated_sequence_weights, min_ratio=0.0, max_ratio=9.0)
    found = corrected((above,), weigh=weigh, bounded=True)
    # 1.5 x 4; 1 x 0.5 x 2, of which the second token is masked out.
    FLOAT32.check(found.weights, torch.tensor([[6.0, 6.0, 0.0], [1.0, 0.0, 1.0]]))
    assert found.mask.tolist() == [[True, True, False], [True, False, True]]


def test_zero_weights_for_all_tokens_raise() -> None:
    with pytest.raises(MismatchError, match=r"leaves `0` of the 5 tokens that have an advantage"):
        objective_of(actor_stage(), correction=stub_models.correction(torch.zeros(2, 3), stub_models.MASK))


def test_non_finite_sampler_logprob_raises_in_correction() -> None:
    bad = stub_models.ACTOR.clone()
    bad[1, 2] = math.nan
    with pytest.raises(NonFiniteError, match=r"log-prob of the sampler is `nan` .*sequence 1, response token 2"):
        TIS.run(stub_models.rollouts(sampler_logprobs=bad), stub_models.logprobs())


def test_corrected_update_metrics_use_kept_tokens() -> None:
    kept = stub_models.MASK & torch.tensor([[True, False, False], [True, True, True]])
    logprobs = replace(stub_models.logprobs(), entropy=torch.tensor([[1.0, 9.0, 0.0], [1.0, 1.0, 1.0]]))
    inputs = (
        stub_models.rollouts(),
        logprobs,
        stub_models.advantages(),
        stub_models.correction(torch.ones(2, 3), kept),
    )
    moved = stub_models.Engine(stub_models.ACTOR + torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
    stage = actor_stage(
        models=stub_models.Models(moved), plan=replace(plan(), minibatch_seqs=2), positive_nll_coef=0.1
    )
    advantages = replace(stub_models.advantages(), shaped=torch.tensor([1.0, 1.0]))
    metrics = stage.run(STATES["actor"], inputs[0], inputs[1], advantages, inputs[3]).metrics()
    assert metrics["policy/entropy_mean"] == 1.0
    # The token whose ratio is exp(5) is masked out, and its likelihood is not raised.
    assert metrics["policy/ratio_max"] == 1.0
    assert recorded_objective(stage).totals(BOTH) == (4, 4)


def test_extremes_of_clamped_ratios_are_those_of_all_minibatches() -> None:
    """The smallest comes from one row, the largest from the other. The ratio of 9 is masked out."""
    ratios = torch.tensor([[0.9, 1.1, 9.0], [1.0, 0.5, 1.05]])
    models = stub_models.Models(stub_models.Engine(stub_models.ACTOR + ratios.log()))
    read = stub_models.rollouts(), stub_models.logprobs(), stub_models.advantages()
    record = actor_stage(models=cast(Any, models)).run(STATES["actor"], *read)
    FLOAT32.check(record.summary["policy/clamped_ratio_min"], 0.8)
    FLOAT32.check(record.summary["policy/clamped_ratio_max"], 1.1)
    # A replay compares the metrics of minibatches with records of earlier versions, which do not have these.
    assert not [name for name in record.per_minibatch if name.startswith("clamped")]
    without = actor_stage(models=cast(Any, models), loss=Reinforce()).run(STATES["actor"], *read)
    assert not [name for name in without.metrics() if "clamped" in name]


def test_value_loss_uses_global_count_and_scale() -> None:
    stage = critic_stage(scale=0.5)
    # The returns are these advantages plus 1.
    returns = stub_models.advantages(torch.tensor([[8.0, 8.0, 0.0], [0.0, 1.0, 2.0]]))
    stage.run(STATES["critic"], stub_models.rollouts(), stub_models.values(), returns)
    # Squared errors of row 1: 1, 0, 4; half of their sum over 5 tokens, scaled.
    found = recorded_objective(stage)(torch.tensor([1]), TokenOutputs(torch.tensor([[0.0, 2.0, 1.0]])), (5,))
    FLOAT32.check(found, 0.5 * 5 / 2 / 5)
    at_returns = recorded_objective(stage)(torch.tensor([1]), TokenOutputs(torch.tensor([[1.0, 2.0, 3.0]])), (5,))
    FLOAT32.check(at_returns, 0.0)


def test_explained_variance_is_reported_before_and_after_update() -> None:
    goals = stub_models.advantages().returns  # 2, 3 | 0, 1.5, 4: mean 2.1, squares 31.25 - 5 x 2.1^2 = 9.2

    class Learning(stub_models.Engine):
        """Values halfway to the returns in its first epoch; equal to them in the second, except for one token."""

        def update(self, sequences: object, minibatches: list[Minibatch], objective: object) -> list[MinibatchResult]:
            nearly = goals - torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]) + 7.0 * ~stub_models.MASK
            seen = [goals / 2, goals / 2, nearly, nearly]
            return [
                MinibatchResult(0.0, 1.0, TokenOutputs(one[m.rows])) for one, m in zip(seen, minibatches, strict=True)
            ]

    stage = critic_stage(models=stub_models.Models(Learning()), plan=plan(epochs=2))
    old = stub_models.values(torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.5, 5.0]]))
    metrics = stage.run(STATES["critic"], stub_models.rollouts(), old, stub_models.advantages()).metrics()
    # Returns minus values before: 1, 1, 1, 1, -1: mean 0.6, squares 5 - 5 x 0.36 = 3.2.
    assert metrics["value/explained_variance"] == pytest.approx(1 - 3.2 / 9.2)
    # Minus those of the second epoch: 0, 1, 0, 0, 0: mean 0.2, squares 1 - 5 x 0.04 = 0.8.
    assert metrics["value/explained_variance_last_epoch"] == pytest.approx(1 - 0.8 / 9.2)


def test_merge_error_after_last_minibatch_is_a_metric_of_the_step() -> None:
    class Adapted(stub_models.Engine):
        def update(self, sequences: object, minibatches: list[Minibatch], objective: object) -> list[MinibatchResult]:
            results = super().update(sequences, minibatches, objective)  # type: ignore[arg-type]
            return [*results[:-1], replace(results[-1], merge_error=0.25)]

    inputs = (STATES["actor"], stub_models.rollouts(), stub_models.logprobs(), stub_models.advantages())
    record = actor_stage(models=stub_models.Models(Adapted()), plan=plan(epochs=2)).run(*inputs)
    assert len(record.per_minibatch["loss"]) > 1
    assert record.metrics()["policy/merge_error"] == 0.25
    assert "merge_error" not in record.per_minibatch
    assert "policy/merge_error" not in actor_stage().run(*inputs).metrics()


@pytest.mark.parametrize("changed", ["rollouts", "logprobs", "advantages", "fingerprint", "parent"])
def test_actor_lineage_covers_all_inputs(changed: str) -> None:
    as_is, other = (lineage_of_the_actor(name) for name in ("", changed))
    assert as_is == lineage_of_the_actor("")
    assert as_is != other


def lineage_of_the_actor(changed: str) -> str:
    state = replace(STATES["actor"], lineage="other") if changed == "parent" else STATES["actor"]
    record = actor_stage(fingerprint="others" if changed == "fingerprint" else "keys").run(
        state,
        stub_models.rollouts(seeds=torch.tensor([3, 4])) if changed == "rollouts" else stub_models.rollouts(),
        stub_models.logprobs(stub_models.ACTOR * 1.5) if changed == "logprobs" else stub_models.logprobs(),
        stub_models.advantages(stub_models.ACTOR) if changed == "advantages" else stub_models.advantages(),
    )
    return record.lineage


def test_sampler_logprobs_change_lineage_only_with_correction() -> None:
    def lineages(*, corrects: bool) -> set[str]:
        found = (stub_models.rollouts(), stub_models.rollouts(sampler_logprobs=stub_models.ACTOR * 1.5))
        made = {}
        for rollouts in found:
            inputs = [rollouts, stub_models.logprobs(), stub_models.advantages()]
            inputs += [TIS.run(rollouts, stub_models.logprobs())] if corrects else []
            made[actor_stage().run(STATES["actor"], *inputs).lineage] = rollouts
        return set(made)

    assert (len(lineages(corrects=False)), len(lineages(corrects=True))) == (1, 2)


@pytest.mark.parametrize("changed", ["rollouts", "values", "advantages", "fingerprint", "parent"])
def test_critic_lineage_covers_all_inputs(changed: str) -> None:
    assert lineage_of_the_critic("") != lineage_of_the_critic(changed)


def lineage_of_the_critic(changed: str) -> str:
    state = replace(STATES["critic"], lineage="other") if changed == "parent" else STATES["critic"]
    record = critic_stage(fingerprint="others" if changed == "fingerprint" else "keys").run(
        state,
        stub_models.rollouts(seeds=torch.tensor([3, 4])) if changed == "rollouts" else stub_models.rollouts(),
        stub_models.values(stub_models.ACTOR) if changed == "values" else stub_models.values(),
        stub_models.advantages(stub_models.ACTOR) if changed == "advantages" else stub_models.advantages(),
    )
    return record.lineage


def test_lineage_digest_format_is_stable() -> None:
    """A run in progress is resumed by it, so no digest may change."""
    rollouts, logprobs, values, advantages = (
        stub_models.rollouts(),
        stub_models.logprobs(),
        stub_models.values(),
        stub_models.advantages(),
    )
    corrected = stub_models.correction(torch.full((2, 3), 1.5))
    found = {
        "actor": actor_stage().run(STATES["actor"], rollouts, logprobs, advantages).lineage,
        "corrected": actor_stage().run(STATES["actor"], rollouts, logprobs, advantages, corrected).lineage,
        "critic": critic_stage().run(STATES["critic"], rollouts, values, advantages).lineage,
    }
    reads = {
        "actor": (rollouts.identity, logprobs.identity, advantages.identity),
        "corrected": (rollouts.identity, logprobs.identity, advantages.identity, corrected.identity),
        "critic": (rollouts.identity, values.identity, advantages.identity),
    }
    for name, identities in reads.items():
        text = "\n".join(("update", "parent", "keys", *identities))
        assert found[name] == hashlib.sha256(text.encode()).hexdigest()


def test_update_continues_from_earlier_optimizer_steps() -> None:
    inputs = {
        "actor": (stub_models.logprobs(), stub_models.advantages()),
        "critic": (stub_models.values(), stub_models.advantages()),
    }
    for role, stage in (("actor", actor_stage(plan=plan(epochs=2))), ("critic", critic_stage(plan=plan(epochs=2)))):
        record = stage.run(STATES[role], stub_models.rollouts(), *inputs[role])
        assert (record.step, record.updates, record.parent) == (5, 9 + 4, "parent")
        # 1 - update / 20, counted on from 9.
        assert record.per_minibatch["lr"] == pytest.approx([0.55, 0.5, 0.45, 0.4])
        prefix = {"actor": "policy", "critic": "value"}[role]
        assert record.metrics()[f"{prefix}/lr"] == pytest.approx(0.4)


def test_step_based_rate_counts_from_first_training_step_of_role() -> None:
    schedule = replace(plan().schedule, steps_before=3)
    state = STATES["actor"]  # of step 4: the step after it is the second that trains
    assert [schedule.at(replace(state, step=step), done=7).lr for step in (3, 4, 5)] == pytest.approx([1, 0.95, 0.9])


def test_rows_without_a_token_in_the_loss_are_not_computed() -> None:
    """Six rows in order, three in each minibatch. Row 1 has a token only in the second term, rows 0 and 5 in none."""
    first = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 0], [0, 1], [0, 0]], dtype=torch.bool)
    second = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0], [0, 1], [0, 0]], dtype=torch.bool)
    in_order = replace(plan(epochs=1), minibatch_seqs=3, seed=None)
    found = in_order.minibatches(STATES["actor"], 6, stub_models.in_loss(first, second))
    assert [minibatch.rows.tolist() for minibatch in found] == [[1, 2], [3, 4]]
    assert [minibatch.totals for minibatch in found] == [(2, 1), (2, 1)]
    found = in_order.minibatches(STATES["actor"], 6, stub_models.in_loss(first, second), first_has_all_rows=True)
    assert [minibatch.rows.tolist() for minibatch in found] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize("is_measured_before", [True, False])
def test_gap_to_the_sampler_is_measured_on_rows_that_are_not_trained(is_measured_before: bool) -> None:
    """A correction rejects both tokens of row 0, whose gap is the only one."""
    in_order = replace(plan(), minibatch_seqs=2, seed=None)
    stage = actor_stage(plan=in_order)
    logprobs = stub_models.logprobs()
    given = {
        "rollouts": stub_models.rollouts(
            sampler_logprobs=stub_models.ACTOR + torch.tensor([[0.5], [0.0]]) * stub_models.MASK
        ),
        "logprobs": logprobs if is_measured_before else replace(logprobs, entropy=None),
        "advantages": stub_models.advantages(),
        "correction": stub_models.correction(torch.ones(2, 3), stub_models.MASK & torch.tensor([[False], [True]])),
    }
    record = stage.run(STATES["actor"], **given)
    [minibatch] = cast(stub_models.Models, stage.models).engine.calls["minibatches"]
    assert minibatch.rows.tolist() == ([1] if is_measured_before else [0, 1])
    assert minibatch.totals == (3,)
    gap = None if record.gap is None else record.gap["gap_mean_abs"]
    assert gap == (None if is_measured_before else pytest.approx(2 * 0.5 / 5))


def test_row_order_differs_by_epoch_step_and_role() -> None:
    def orders(role: str, step: int) -> list[tuple[int, ...]]:
        state = replace(STATES[role], step=step - 1)
        found: list[Minibatch] = plan(epochs=2).minibatches(
            state, 64, stub_models.in_loss(torch.ones(64, 1, dtype=torch.bool))
        )
        rows = [int(minibatch.rows) for minibatch in found]
        return [tuple(rows[:64]), tuple(rows[64:])]

    all_orders = [order for role in STATES for step in (1, 2) for order in orders(role, step)]
    assert len(set(all_orders)) == len(all_orders) == 8
    assert orders("actor", 1) == all_orders[:2]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (20, [20]),
        (64, [64]),
        (76, [38, 38]),
        (97, [49, 48]),
        (170, [57, 57, 56]),
        (256, [64] * 4),
        (300, [75] * 4),
        (700, [175] * 4),
    ],
)
def test_minibatches_of_a_varying_number_of_rows_are_equal_and_at_most_as_many_as_planned(
    rows: int, sizes: list[int]
) -> None:
    """Minibatches of 64 sequences, four of which are planned."""
    varying = replace(plan(epochs=2), minibatch_seqs=64, at_most=4)
    objective = stub_models.in_loss(torch.ones(rows, 1, dtype=torch.bool))
    found = varying.minibatches(STATES["actor"], rows, objective)
    assert [len(minibatch.rows) for minibatch in found] == sizes * 2
    assert sorted(torch.cat([each.rows for each in found[: len(sizes)]]).tolist()) == list(range(rows))
