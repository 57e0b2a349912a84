"""Balanced experts: the sequence-wise loss and the update of the bias have the numbers of Megatron-Core's functions
and of transformers' routers, under layouts of real gloo processes, in microbatches, with recomputed activations.

Not verified: collectives of a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layout_lab
import megatron_lab as lab
import pytest
import torch
from layout_lab import CHANGE_GAP, GRADIENT_GAP, SHARDED, Model, gap, settings_of, started
from megatron.core.transformer.moe.moe_utils import (
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    switch_load_balancing_loss_func,
)
from rank_pool import RankPool
from torch import Tensor
from transformers import PreTrainedModel

from ppoctl.algorithms.role_table import BySequences
from ppoctl.algorithms.stages.objective import Terms
from ppoctl.core.errors import NonFiniteError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import OutputRequest, TokenOutputs, Totals
from ppoctl.engines.megatron.low_rank import adapters_in
from ppoctl.engines.megatron.megatron_config import RouterBalance
from ppoctl.engines.megatron.packed_input import SequenceShares
from ppoctl.engines.megatron.router import ExpertRouter, SigmoidRouter, SoftmaxRouter, routers_in, update_biases
from ppoctl.models.head import SharedValueHead
from ppoctl.models.lora import Lora
from ppoctl.models.shape import SigmoidRouting
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

BIAS = "e_score_correction_bias"
COEF, RATE = 0.7, 0.03
ALONE_IN_GROUP = SimpleNamespace(size=lambda: 1)


def router(shares: SequenceShares, given: Tensor | None = None, **settings: Any) -> SimpleNamespace:
    """Return the parts of a router with three of eight experts per token, which is balanced over these sequences.
    Its choice is replaced by the given experts."""
    made = SimpleNamespace(
        num_experts=8, topk=3, packed=SimpleNamespace(shares=shares), tp_cp_group=ALONE_IN_GROUP, renormalise=True
    )
    vars(made).update(aux_loss=None, step_loads=None, **settings)
    made.config = SimpleNamespace(sequence_parallel=False, moe_aux_loss_coeff=COEF, moe_router_bias_update_rate=RATE)
    made.experts_of = lambda best: best if given is None else given
    made.counted = lambda chosen: chosen
    made.balanced = lambda *each: ExpertRouter.balanced(made, *each)
    return made


GIVEN = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(row))[:3] for row in range(13)])


@pytest.mark.parametrize("given", [None, GIVEN], ids=["own choice", "given experts"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_loss_and_gradient_of_a_layer_are_those_of_megatron_core(scores: str, given: Tensor | None) -> None:
    """Two of four sequences of a minibatch, whose tokens alternate, and two tokens of padding. Loads and loss count
    the experts that are used, also if another pass has chosen them."""
    logits = torch.randn(13, 8, generator=torch.Generator().manual_seed(1))
    sequence = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1, 1, 1, 2, 2])
    shares = SequenceShares(sequence, torch.tensor([0.25, 0.25, 0.0]))
    found, expected = (logits.clone().requires_grad_() for _ in range(2))
    if scores == "softmax":
        made = router(shares, given)
        weights, chosen = SoftmaxRouter.routing(made, found[:, None])
    else:
        how = SigmoidRouting(groups=1, groups_per_token=1, scale=2.5)
        made = router(shares, given, how=how, expert_bias=torch.zeros(8))
        weights, chosen = SigmoidRouter.routing(made, found[:, None])
    (0.0 * weights).sum().backward()

    losses = []
    for tokens in (sequence == 0, sequence == 1):
        used, likely = compute_routing_scores_for_aux_loss(expected[tokens], 3, scores)
        if given is not None:
            used = torch.zeros_like(used).scatter(1, given[tokens], value=True)
        assert torch.equal(used, chosen[tokens]), "without a bias, the best experts are used"
        losses.append(switch_load_balancing_loss_func(likely, used.sum(0), int(tokens.sum()), 3, 8, COEF))
    loss = torch.stack(losses).sum() / 4
    loss.backward()
    FLOAT32.check(found.grad, expected.grad)
    assert float(expected.grad.abs().max()) > 1e-3
    FLOAT32.check(made.aux_loss, torch.tensor([float(loss.detach()) / COEF, 0.5]))
    assert torch.equal(made.step_loads, chosen[:11].sum(0))


def test_pass_without_gradient_is_not_balanced():
    made = router(SequenceShares(torch.zeros(5, dtype=torch.int64), torch.ones(1)))
    with torch.no_grad():
        SoftmaxRouter.routing(made, torch.randn(5, 1, 8))
    assert made.aux_loss is None
    assert made.step_loads is None


@dataclass
class Routed:
    """Results of the routers of a transformers model, a tensor for each sequence and layer with experts."""

    scores: list[Tensor] = field(default_factory=list)
    """[tokens experts], with a sum of 1."""
    chosen: list[Tensor] = field(default_factory=list)
    """[tokens experts], 1 for an expert that is used."""

    def note(self, gate: Any, _: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, best = outputs[0][:-1], outputs[2][:-1]  # the last token of a sequence is not an input of the trainer
        has_bias = hasattr(gate, BIAS)
        scores = logits.double().sigmoid() if has_bias else logits.double().softmax(-1)
        self.scores.append(scores / scores.sum(-1, keepdim=True))
        self.chosen.append(torch.zeros_like(scores).scatter(1, best, 1.0))

    def loss(self, num_seqs: int) -> Tensor:
        """Return the sum over layers of the mean over sequences of sum_i f_i P_i."""
        total = torch.zeros((), dtype=torch.float64)
        for scores, chosen in zip(self.scores, self.chosen, strict=True):
            fractions = chosen.mean(0) * chosen.shape[1] / chosen[0].sum()
            total = total + (fractions * scores.mean(0)).sum()
        return total / num_seqs

    def loads(self, num_seqs: int) -> Tensor:
        """Return the tokens of each expert, [layers experts]."""
        layers = len(self.chosen) // num_seqs
        return torch.stack(
            [sum(each.sum(0) for each in self.chosen[layer::layers]) for layer in range(layers)]
        ).long()


@contextmanager
def noted(model: PreTrainedModel) -> Iterator[Routed]:
    """Context in which the routers of a model are noted, also those of copies."""
    found = Routed()
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    # A copy of the model has copies of its hooks; only a function keeps the object that it refers to.
    handles = [gate.register_forward_hook(lambda *call: found.note(*call)) for gate in gates]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class WithBalance:
    """An objective with the balance loss of transformers' routers, which have run."""

    objective: Any
    routed: Routed

    @property
    def request(self) -> OutputRequest:
        return self.objective.request

    def totals(self, rows: Tensor) -> Totals:
        return self.objective.totals(rows)

    def __call__(self, rows: Tensor, outputs: TokenOutputs, totals: Totals) -> Tensor:
        return self.objective(rows, outputs, totals) + COEF * self.routed.loss(len(rows))


MIXED, SIGMOID = "qwen3-moe-mixed", "deepseek-v3"
ALL, TOP = Trainable(), Trainable(top_layers=1)
CASES = [
    ("qwen3-moe", "alone", "none", ALL),
    (SIGMOID, "alone", "selective", ALL),
    ("qwen3-moe", "alone", "full", TOP),
    (MIXED, "PP2 interleaved", "selective", ALL),
    ("qwen3-moe", "EP4", "full", ALL),
    (SIGMOID, "CP2 DP2 EP4", "none", ALL),
    (SIGMOID, "TP2 DP2 EP2, experts split", "full", ALL),
    (SIGMOID, "CP2 TP2", "selective", TOP),
]


@pytest.mark.parametrize(("kind", "layout", "recompute", "part"), CASES)
def test_gradient_with_the_loss_is_that_of_transformers(
    pool: RankPool, model: Model, kind: str, layout: str, recompute: str, part: Trainable
) -> None:
    """Also with microbatches of one sequence, so that ranks with few rows wait with an idle microbatch. The loss has
    no gradient in frozen layers, but counts them."""
    rollouts = lab.make_rollouts()
    objective, seqs = layout_lab.policy_objective(rollouts), rollouts.num_seqs
    with noted(lab.hugging_face_model(kind)) as routed:
        _, expected = lab.expected_gradients(kind, rollouts, WithBalance(objective, routed))  # type: ignore[arg-type]
    per_layer = float(routed.loss(seqs).detach()) * seqs / len(routed.chosen)
    balance = RouterBalance(aux_loss_coef=COEF)
    actor = started(pool, settings_of(model, kind, layout, recompute=recompute, balance=balance, trainable=part))
    still = replace(lab.STEP, lr=0.0)
    plain = lab.expected_gradients(kind, rollouts, objective)[1]
    assert gap(plain, expected) > 0.05, "the loss must matter"
    for batching in (None, BySequences(microbatch_seqs=1)):
        if batching is not None:
            pool.examine(layout_lab.set_microbatches, batching)
        MEASUREMENTS.take()
        actor.update(rollouts, [lab.minibatch(rollouts, step=still)], objective)
        found = {name: gradient for name, gradient in pool.gradients().items() if part is ALL or gradient.any()}
        assert any(name.endswith("mlp.gate.weight") for name in found)
        assert gap(found, {name: expected[name] for name in found}) < GRADIENT_GAP
        loss, number = MEASUREMENTS.take().passes[-1].router_aux_loss
        FLOAT32.check(loss / number, per_layer)


def updated_biases(kind: str, rollouts: lab.TrainerBatch, minibatches: list[list[int]]) -> dict[str, Tensor]:
    """Return the biases after these minibatches, by the routers of transformers."""
    model, sequences = lab.hugging_face_model(kind), rollouts.unpadded()
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(BIAS)]
    before = [buffer.clone() for _, buffer in biases]
    try:
        for rows in minibatches:
            with torch.no_grad(), noted(model) as routed:
                for row in rows:
                    model(input_ids=sequences[row][None])
            loads = routed.loads(len(rows))
            for (_, buffer), of_layer in zip(biases, loads, strict=True):
                mean = of_layer.sum() / of_layer.numel()
                buffer.add_(torch.sign(mean - of_layer), alpha=RATE)
        return {name: buffer.clone() for name, buffer in biases}
    finally:
        for (_, buffer), old in zip(biases, before, strict=True):
            buffer.copy_(old)


def biases_in(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight for name, weight in weights.items() if name.endswith(BIAS)}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("alone", "full"),
        ("EP4", "none"),
        ("PP2 EP2", "selective"),
        ("CP2 DP2 EP4", "none"),
        ("TP2 DP2 EP2, experts split", "full"),
    ],
)
def test_bias_follows_the_loads_of_each_minibatch(pool: RankPool, model: Model, layout: str, recompute: str) -> None:
    """Weights stay, so transformers computes the loads. A minibatch routes with the biases of the one before it."""
    rollouts, minibatches = lab.make_rollouts(), [[0, 1, 2, 3, 4], [3, 1], [4, 0, 2]]
    expected = updated_biases(SIGMOID, rollouts, minibatches)
    settings = settings_of(model, SIGMOID, layout, recompute=recompute, balance=RouterBalance(bias_rate=RATE))
    actor = started(pool, settings)
    still = replace(lab.STEP, lr=0.0)
    steps = [lab.minibatch(rollouts, rows, step=still) for rows in minibatches]
    actor.update(rollouts, steps, layout_lab.policy_objective(rollouts))
    weights = layout_lab.weights_of(pool)
    lab.assert_same(biases_in(weights), expected)
    assert not torch.equal(*(torch.cat(list(biases.values())) for biases in (expected, source_biases())))


def source_biases() -> dict[str, Tensor]:
    return biases_in(dict(lab.hugging_face_model(SIGMOID).named_buffers()))


def test_bias_is_updated_as_by_megatron_core(fresh):
    """Loads below, at and above the mean of a layer."""
    rank = lab.rank_of(fresh(SIGMOID))
    routers = routers_in(rank.models)
    before = [made.expert_bias.clone() for made in routers]
    loads = torch.tensor([[5, 0, 3, 3, 3, 4, 3, 3], [9, 0, 0, 0, 0, 0, 0, 1]])
    expected = get_updated_expert_bias(loads.float(), torch.stack(before), RATE)
    try:
        for made, each in zip(routers, loads, strict=True):
            made.step_loads = each
        update_biases(rank.models, RATE)
        EXACT.check(torch.stack([made.expert_bias for made in routers]), expected)
        assert torch.equal(routers[0].expert_bias[2], before[0][2])
        assert all(made.step_loads is None for made in routers)
    finally:
        for made, bias in zip(routers, before, strict=True):
            made.expert_bias.copy_(bias)


@pytest.mark.parametrize(
    ("saved_under", "loaded_under"), [("PP2 EP2", "alone"), ("alone" + SHARDED, "TP2 EP2" + SHARDED)]
)
def test_biases_are_a_part_of_saved_states(
    pool: RankPool, model: Model, saved_under: str, loaded_under: str, tmp_path: Path
) -> None:
    """Also the next step changes weights and biases as without an interruption."""
    balance = RouterBalance(COEF, RATE)
    settings = (settings_of(model, SIGMOID, layout, balance=balance) for layout in (saved_under, loaded_under))
    assert layout_lab.resumes_under_layout(pool, *settings, tmp_path) < CHANGE_GAP
    found = biases_in(layout_lab.weights_of(pool))
    assert all(not torch.equal(bias, found[name]) for name, bias in source_biases().items())


def test_step_that_is_not_taken_changes_no_bias(model):
    """The next step does not count its loads, with which other biases would rise."""
    settings = replace(lab.actor(model(SIGMOID)).settings, balance=RouterBalance(bias_rate=RATE))
    actor, rollouts = lab.started(settings), lab.make_rollouts()
    infinite = lab.policy_objective(rollouts, weights=torch.full(rollouts.tokens.shape, torch.inf))
    with pytest.raises(NonFiniteError):
        actor.update(rollouts, [lab.minibatch(rollouts, [3, 4])], infinite)
    lab.assert_same(biases_in(lab.weights_of(actor)), source_biases())
    still = lab.minibatch(rollouts, [0], step=replace(lab.STEP, lr=0.0))
    actor.update(rollouts, [still], lab.policy_objective(rollouts))
    expected, both = (updated_biases(SIGMOID, rollouts, [rows]) for rows in ([0], [0, 3, 4]))
    lab.assert_same(biases_in(lab.weights_of(actor)), expected)
    assert any(not torch.equal(bias, both[name]) for name, bias in expected.items())


@pytest.mark.parametrize("kind", ["qwen3-moe", SIGMOID])
def test_gradient_of_adapters_has_the_loss(model, kind):
    """Routers are frozen, so the loss reaches adapters through hidden states. While B is 0, its gradient is that of
    the merged weight times A."""
    settings = replace(lab.actor(model(kind)).settings, balance=RouterBalance(aux_loss_coef=COEF))
    rollouts = lab.make_rollouts()
    whole, adapted = (
        lab.started(replace(settings, trainable=Trainable(lora=lora))) for lora in (None, Lora(rank=3, alpha=6.0))
    )
    for actor in (whole, adapted):
        still = lab.minibatch(rollouts, step=replace(lab.STEP, lr=0.0))
        actor.update(rollouts, [still], lab.policy_objective(rollouts))
    matrices = adapters_in(lab.rank_of(adapted).models)
    expected = lab.gradients_of(whole)
    found = {name: own.b.main_grad for name, (own, _) in matrices.items()}
    assert len(found) > 10
    assert (
        gap(found, {name: 2.0 * expected[name] @ own.a.detach().T for name, (own, _) in matrices.items()})
        < GRADIENT_GAP
    )


def test_copied_layers_of_a_value_head_are_not_balanced(model):
    """Layers 2 and 3 have experts, and the value head has a copy of layer 3."""
    settings = lab.actor(model(SIGMOID)).settings
    head = SharedValueHead("linear", layers_copied=1)
    actor = lab.started(replace(settings, balance=RouterBalance(COEF, RATE), value_head=head))
    rollouts, minibatch = lab.make_rollouts(), [0, 1, 2, 3, 4]
    objective = Terms(lab.policy_objective(rollouts).terms, OutputRequest(values=True))
    MEASUREMENTS.take()
    actor.update(rollouts, [lab.minibatch(rollouts, minibatch, step=replace(lab.STEP, lr=0.0))], objective)
    lab.assert_same(biases_in(lab.weights_of(actor)), updated_biases(SIGMOID, rollouts, [minibatch]))
    _, number = MEASUREMENTS.take().passes[-1].router_aux_loss
    FLOAT32.check(number, 2.0)
    [copied] = routers_in([lab.rank_of(actor).models[0].value_head])
    EXACT.check(copied.expert_bias, list(source_biases().values())[-1])
