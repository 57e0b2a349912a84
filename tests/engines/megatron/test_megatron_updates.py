"""An update follows the recipe's settings, independent of the split into microbatches.

Verified: gradients equal those of transformers and do not depend on the split; the step uses exactly the given
numbers; masked tokens have no influence; non-finite values never reach the weights. Not verified: sums over
data-parallel ranks.
"""

import math
from dataclasses import replace

import megatron_lab as lab
import pytest
import torch

from ppoctl.algorithms.formulas.aggregation import SequenceMean
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms
from ppoctl.core.errors import NonFiniteError, OutOfMemoryError, RecipeError
from ppoctl.core.ports import OptimizerStep, OutputRequest
from tolerance import EXACT, FLOAT32

CUTS = [
    BySequences(microbatch_seqs=1),
    BySequences(microbatch_seqs=2, logits_chunk_tokens=3),
    BySequences(microbatch_seqs=4),
    ByTokens(max_tokens_per_microbatch=12, logits_chunk_tokens=4),
]


@pytest.mark.parametrize("kind", sorted(lab.MODELS))
def test_gradients_match_transformers(fresh, kind):
    rollouts, trainer = lab.make_rollouts(), fresh(kind)
    objective = lab.policy_objective(rollouts, needs_entropy=True, temperature=0.8)
    [result] = trainer.update(rollouts, [lab.minibatch(rollouts, step=replace(lab.STEP, lr=0.0))], objective)
    loss, expected = lab.expected_gradients(kind, rollouts, objective)
    found = lab.gradients_of(trainer)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        lab.GRADIENT.check(gradient, expected[name])
    FLOAT32.check(result.loss, loss)
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm()
    FLOAT32.check(result.grad_norm, norm)


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("needs_entropy", "kind"),
    # A random subset has a kind with experts and a kind without, and both results.
    [
        *((False, kind) for kind in ("qwen2", "gemma2", "qwen2-moe", "qwen3-moe")),
        *((True, kind) for kind in ("qwen2-moe", "qwen3-moe", "qwen2", "gemma2")),
    ],
)
def test_actor_update_does_not_depend_on_microbatch_split(model, kind, needs_entropy):
    rollouts = lab.make_rollouts()
    rows = [3, 0, 4, 1]
    whole = lab.actor(model(kind), batching=BySequences(microbatch_seqs=9))
    objective = lab.policy_objective(rollouts, needs_entropy=needs_entropy)
    [expected] = whole.update(rollouts, [lab.minibatch(rollouts, rows)], objective)
    gradients = lab.gradients_of(whole)
    assert (expected.outputs.entropy is not None) == needs_entropy
    for cut in CUTS:
        trainer = lab.actor(model(kind), batching=cut)
        before, entropy_before = lab.scores(trainer, rollouts)
        [found] = trainer.update(rollouts, [lab.minibatch(rollouts, rows)], objective)
        lab.check_all(lab.GRADIENT, lab.gradients_of(trainer), gradients)
        FLOAT32.check(found.loss, expected.loss)
        FLOAT32.check(found.grad_norm, expected.grad_norm)
        FLOAT32.check(found.outputs.primary, expected.outputs.primary)
        # Outputs belong to the state before the step, with rows in the minibatch's order.
        FLOAT32.check(found.outputs.primary, before[rows])
        if found.outputs.entropy is not None:
            FLOAT32.check(found.outputs.entropy, entropy_before[rows])


def test_critic_update_does_not_depend_on_microbatch_split(model):
    rollouts = lab.make_rollouts()
    trainers = [lab.critic(model("qwen2"), batching=cut) for cut in CUTS]
    batches = [lab.minibatch(rollouts), lab.minibatch(rollouts, [2, 0])]
    results = [trainer.update(rollouts, batches, lab.value_objective(rollouts)) for trainer in trainers]
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            FLOAT32.check(one.loss, expected.loss)
            FLOAT32.check(one.outputs.primary, expected.outputs.primary)


def test_loss_terms_do_not_depend_on_microbatch_split(model):
    rollouts = lab.make_rollouts()
    losses = lab.policy_objective(rollouts).terms[0].loss
    chosen = rollouts.mask & torch.tensor([True, False, True, True, False])[:, None]
    objective = Terms(
        (
            Term(losses, rollouts.mask, coef=0.7, aggregation=SequenceMean()),
            Term(losses, chosen, coef=-0.2),
            Term(losses, torch.zeros_like(chosen)),  # no unmasked token: adds nothing
        )
    )
    rows = torch.tensor([3, 0, 4, 1])
    batch = replace(lab.minibatch(rollouts, rows.tolist()), totals=objective.totals(rows))
    assert batch.totals == (4, int(chosen[[3, 0]].sum()), 0)
    whole = lab.actor(model("qwen2"), batching=BySequences(microbatch_seqs=9))
    [expected] = whole.update(rollouts, [batch], objective)
    counted, of_chosen = rollouts.mask[rows], chosen[rows]
    by_token = losses(LossInputs(rows, expected.outputs.primary, None), counted)
    by_sequence = torch.stack([by_token[row][counted[row]].mean() for row in range(4)])
    gradients = lab.gradients_of(whole)
    FLOAT32.check(expected.loss, 0.7 * by_sequence.mean() - 0.2 * by_token[of_chosen].mean())
    for cut in CUTS:
        trainer = lab.actor(model("qwen2"), batching=cut)
        [found] = trainer.update(rollouts, [batch], objective)
        FLOAT32.check(found.loss, expected.loss)
        lab.check_all(lab.GRADIENT, lab.gradients_of(trainer), gradients)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_masked_out_garbage_does_not_change_update(model, garbage):
    rollouts = lab.make_rollouts()
    trainers = [lab.actor(model("qwen2")) for _ in range(2)]
    old, _ = lab.scores(trainers[0], rollouts)
    advantages = lab.random_weights(rollouts)
    objectives = [
        lab.ppo_objective(rollouts.mask, old, advantages),
        lab.ppo_objective(
            rollouts.mask,
            torch.where(rollouts.mask, old, garbage),
            torch.where(rollouts.mask, advantages, garbage),
        ),
    ]
    [expected], [found] = (
        trainer.update(rollouts, [lab.minibatch(rollouts)], objective)
        for trainer, objective in zip(trainers, objectives, strict=True)
    )
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    lab.check_all(EXACT, lab.weights_of(trainers[1]), lab.weights_of(trainers[0]))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    # A random subset has both kinds and both dtypes.
    [("qwen2", "float32"), ("qwen2", "bfloat16"), ("qwen3-moe", "bfloat16"), ("qwen3-moe", "float32")],
)
def test_repeated_updates_are_bitwise_equal(model, kind, dtype):
    rollouts = lab.make_rollouts()
    runs = []
    for _ in range(2):
        trainer = lab.actor(model(kind), dtype=dtype)
        trainer.update(rollouts, [lab.minibatch(rollouts)] * 3, lab.policy_objective(rollouts, needs_entropy=True))
        runs.append(lab.weights_of(trainer))
    lab.check_all(EXACT, *runs)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_update_changes_every_critic_weight_including_head(model, kind):
    rollouts = lab.make_rollouts()
    trainer = lab.critic(model(kind))
    before = lab.weights_of(trainer)
    # The gradient below the head is exactly 0 while the head is 0: the second step moves the rest.
    trainer.update(rollouts, [lab.minibatch(rollouts)] * 2, lab.value_objective(rollouts))
    after = lab.weights_of(trainer)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert "score.weight" in after


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_first_step_is_adamw_with_given_hyperparameters(model, kind):
    """After one AdamW step from zero moments, m/(1-b1) = g and v/(1-b2) = g^2, so each weight moves by -lr g / (|g| +
    eps), after shrinking by lr x weight decay; biases and norms do not shrink."""
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model(kind))
    before = lab.weights_of(trainer)
    step = OptimizerStep(lr=3e-3, weight_decay=0.5, grad_clip=0.0, beta1=0.7, beta2=0.9, eps=1e-3)
    trainer.update(rollouts, [lab.minibatch(rollouts, step=step)], lab.policy_objective(rollouts))
    gradients, after = lab.gradients_of(trainer), lab.weights_of(trainer)
    for name, weight in before.items():
        decay = 0.0 if weight.ndim == 1 else 0.5
        gradient = gradients[name]
        FLOAT32.check(after[name], weight * (1 - 3e-3 * decay) - 3e-3 * gradient / (gradient.abs() + 1e-3))


def test_each_minibatch_uses_its_own_optimizer_step(model):
    rollouts = lab.make_rollouts()
    frozen = replace(lab.STEP, lr=0.0)
    moving = replace(lab.STEP, lr=1e-2)
    trainer = lab.actor(model("qwen2"))
    before = lab.weights_of(trainer)
    trainer.update(rollouts, [lab.minibatch(rollouts, step=frozen)], lab.policy_objective(rollouts))
    lab.check_all(EXACT, lab.weights_of(trainer), before)
    trainer.update(
        rollouts, [lab.minibatch(rollouts, step=step) for step in (moving, frozen)], lab.policy_objective(rollouts)
    )
    assert all(not torch.equal(after, before[name]) for name, after in lab.weights_of(trainer).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_cleared_between_minibatches(model, dtype):
    rollouts = lab.make_rollouts()
    frozen = replace(lab.STEP, lr=0.0)
    first, second = (lab.minibatch(rollouts, rows, step=frozen) for rows in ([0, 1], [2, 3, 4]))
    trainer = lab.actor(model("qwen2-tied"), dtype=dtype)
    [alone] = trainer.update(rollouts, [second], lab.policy_objective(rollouts))
    gradients = lab.gradients_of(trainer)
    [_, after] = trainer.update(rollouts, [first, second], lab.policy_objective(rollouts))
    assert after.grad_norm == alone.grad_norm
    lab.check_all(EXACT, lab.gradients_of(trainer), gradients)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_clipping_scales_gradient_and_reports_norm_before(model, kind):
    rollouts = lab.make_rollouts()
    free, clipped = lab.actor(model(kind)), lab.actor(model(kind))
    objective = lab.policy_objective(rollouts)
    [loose] = free.update(rollouts, [lab.minibatch(rollouts)], objective)
    limit = loose.grad_norm / 4
    [tight] = clipped.update(rollouts, [lab.minibatch(rollouts, step=replace(lab.STEP, grad_clip=limit))], objective)
    assert tight.grad_norm == loose.grad_norm
    found = {name: 4 * gradient for name, gradient in lab.gradients_of(clipped).items()}
    lab.check_all(lab.GRADIENT, found, lab.gradients_of(free))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("poison", ["loss", "gradient norm"])
def test_non_finite_loss_or_gradient_never_reaches_weights(model, dtype, poison):
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model("qwen2"), dtype=dtype)
    weights = lab.random_weights(rollouts)
    # Alternatively a finite loss whose squared gradients overflow.
    poisoned = weights.where(~rollouts.mask, math.nan) if poison == "loss" else weights * 1e30
    good, bad = lab.policy_objective(rollouts), lab.policy_objective(rollouts, weights=poisoned)
    trainer.update(rollouts, [lab.minibatch(rollouts)], good)
    before = lab.weights_of(trainer)
    with pytest.raises(NonFiniteError, match=f"^{poison} of the actor is `(nan|inf)` in minibatch 0"):
        trainer.update(rollouts, [lab.minibatch(rollouts)], bad)
    lab.check_all(EXACT, lab.weights_of(trainer), before)


def test_non_finite_error_names_minibatch_and_role(model):
    rollouts = lab.make_rollouts()
    objective = lab.value_objective(rollouts)
    objective.terms[0].loss.returns[4] = math.inf
    batches = [lab.minibatch(rollouts, [0, 1]), lab.minibatch(rollouts, [4])]
    with pytest.raises(NonFiniteError, match=r"^loss of the critic is `inf` in minibatch 1"):
        lab.critic(model("qwen2")).update(rollouts, batches, objective)


def test_bfloat16_update_uses_float32_main_weights(model):
    """A norm's weights are near 1, where bfloat16 values are 0.004 to 0.008 apart: steps of 0.001 would each round to
    nothing, and 16 of them (0.016) must not."""
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model("qwen2"), dtype="bfloat16", batching=BySequences(microbatch_seqs=5))
    before = lab.weights_of(trainer)["model.norm.weight"]
    trainer.update(rollouts, [lab.minibatch(rollouts)] * 16, lab.policy_objective(rollouts))
    after = lab.weights_of(trainer)["model.norm.weight"]
    assert (after != before).float().mean() > 0.8
    assert (after - before).abs().max() < 0.03


def test_sequence_beyond_token_cap_error_names_key(model):
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model("qwen2"), batching=ByTokens(max_tokens_per_microbatch=8))
    with pytest.raises(RecipeError, match="max_tokens_per_microbatch = 8`: a sequence of 11 tokens"):
        lab.scores(trainer, rollouts)
    batching = ByTokens(max_tokens_per_microbatch=40, forward_max_tokens_per_microbatch=8)
    with pytest.raises(RecipeError, match="forward_max_tokens_per_microbatch = 8`: a sequence of 11"):
        lab.scores(lab.actor(model("qwen2"), batching=batching), rollouts)


def test_out_of_memory_in_update_names_key_to_lower(model):
    class Hungry:
        request = OutputRequest()

        def totals(self, rows):
            return (len(rows),)

        def __call__(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory")

    rollouts = lab.make_rollouts()
    with pytest.raises(OutOfMemoryError, match=r"`actor.batching.microbatch_seqs = 2`"):
        lab.actor(model("qwen2")).update(rollouts, [lab.minibatch(rollouts)], Hungry())


def test_out_of_memory_in_forward_names_forward_key(model):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    batching = ByTokens(max_tokens_per_microbatch=20, forward_max_tokens_per_microbatch=40)
    trainer = lab.actor(model("qwen2"), batching=batching)
    lab.rank_of(trainer).models[0].register_forward_hook(out_of_memory)
    with pytest.raises(OutOfMemoryError, match=r"`actor.batching.forward_max_tokens_per_microbatch = 40`"):
        lab.scores(trainer, lab.make_rollouts())
