"""Experts of one pass in another (router replay): the same numbers as Megatron-Core's own replay and as transformers
with routers that are forced to these experts, under layouts of real gloo processes, with recomputed activations.

Not verified: Megatron-Core's kernels of a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import layout_lab
import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, TEMPERATURE, Model, gap, settings_of, started
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from rank_pool import RankPool
from torch import Tensor

from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.router import ExpertRouter, SigmoidRouter, SoftmaxRouter
from ppoctl.models.shape import SigmoidRouting
from tolerance import FLOAT32


def router(given: Tensor | None, experts: int, **settings: Any) -> SimpleNamespace:
    """Return the parts of a router with three experts per token, to which these experts are given."""
    packed = None if given is None else SimpleNamespace(chosen=None, experts=given)
    made = SimpleNamespace(
        num_experts=experts, topk=3, packed=packed, place=0, replayed=None, tp_group=None, **settings
    )
    made.config = SimpleNamespace(sequence_parallel=False)
    made.experts_of = lambda best: ExpertRouter.experts_of(made, best)
    made.counted = lambda chosen: chosen
    made.balanced = lambda weights, *_: weights
    return made


GIVEN = torch.tensor([[0, 5, 2], [3, 4, 1], [6, 0, 7]], dtype=torch.int16)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_weights_and_gradient_of_given_experts_are_those_of_megatron_core(scores):
    logits, weights = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    bias = torch.linspace(-0.5, 0.5, 8)
    found, expected = (logits.clone().requires_grad_() for _ in range(2))
    if scores == "softmax":
        probs, chosen = SoftmaxRouter.routing(router(GIVEN, 8, renormalise=False), found[:, None])
    else:
        how = SigmoidRouting(groups=1, groups_per_token=1, scale=2.5)
        own = router(GIVEN, 8, renormalise=True, how=how, expert_bias=bias)
        probs, chosen = SigmoidRouter.routing(own, found[:, None])
    replay = RouterReplay()
    RouterReplay.global_router_replay_instances.remove(replay)
    replay.set_target_indices(GIVEN.long())
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    sigmoid = {"scaling_factor": 2.5, "expert_bias": bias} if scores == "sigmoid" else {}
    of_core = topk_routing_with_score_function(
        expected, 3, use_pre_softmax=True, score_function=scores, router_replay=replay, **sigmoid
    )
    assert torch.equal(chosen, of_core[1])
    FLOAT32.check(probs, of_core[0])
    for each in (probs, of_core[0]):
        (each * weights).sum().backward()
    FLOAT32.check(found.grad, expected.grad)
    assert float(expected.grad.abs().max()) > 0.01


def test_tokens_without_given_experts_choose_and_do_not_count():
    given = torch.tensor([[0, 5, 2], [-1, -1, -1], [6, 0, 7]], dtype=torch.int16)
    logits = torch.arange(8.0).repeat(3, 1)
    made = router(given, 8, renormalise=True)
    _, chosen = SoftmaxRouter.routing(made, logits[:, None])
    assert [row.nonzero()[:, 0].tolist() for row in chosen] == [[0, 2, 5], [5, 6, 7], [0, 6, 7]]
    # The routers would choose 5, 6 and 7: of the given experts, 0, 2 and 0 are others.
    assert made.replayed.tolist() == [3, 6]


def chosen_by_transformers(kind: str, rollouts: lab.TrainerBatch) -> Tensor:
    """Return the experts that routers of transformers choose: `[N layers k]`, for all input tokens."""
    model, found = lab.hugging_face_model(kind), list[Tensor]()

    def note(_: int, best: Tensor) -> Tensor:
        found.append(best[:-1])
        return best

    with torch.no_grad(), routed(model, note):
        for sequence in rollouts.unpadded():
            model(input_ids=sequence[None])
    rows, layers = rollouts.num_seqs, len(found) // rollouts.num_seqs
    return torch.cat([torch.stack(found[row * layers : (row + 1) * layers], dim=1) for row in range(rows)])


@contextmanager
def routed(model: torch.nn.Module, experts: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Context in which each router uses `experts(layer with experts, best experts)`, weighted as the model weights
    them: softmax over all experts, divided by the sum of the chosen ones if the model does so."""
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]

    def force(layer: int, gate: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, best = outputs
        chosen = experts(layer, best)
        scores = logits.softmax(-1).gather(1, chosen)
        return logits, scores / scores.sum(-1, keepdim=True) if gate.norm_topk_prob else scores, chosen

    handles = [
        gate.register_forward_hook(lambda gate, _, outputs, layer=layer: force(layer, gate, outputs))
        for layer, gate in enumerate(gates)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def others_of(experts: Tensor, count: int) -> Tensor:
    """Return other experts for two of three tokens, in another order of layers."""
    is_kept = (torch.arange(len(experts)) % 3 == 0)[:, None, None]
    return torch.where(is_kept, experts, (experts.flip(1) + 1) % count)


MIXED = "qwen3-moe-mixed"
"""A model in which some layers have no experts."""
CASES = [
    ("qwen3-moe", "alone", "none"),
    (MIXED, "alone", "selective"),
    ("qwen3-moe", "alone", "full"),
    (MIXED, "PP2 interleaved", "selective"),
    ("qwen3-moe", "CP2 DP2 EP4", "none"),
    ("qwen3-moe", "TP2 DP2 EP2, experts split", "full"),
    (MIXED, "PP2 EP2", "selective"),
]


@pytest.mark.parametrize(("kind", "layout", "recompute"), CASES)
def test_outputs_and_gradient_with_given_experts_are_those_of_forced_routers(
    pool: RankPool, model: Model, kind: str, layout: str, recompute: str
) -> None:
    """Also that each layout returns the experts that transformers chooses."""
    rollouts = lab.make_rollouts()
    actor = started(pool, settings_of(model, kind, layout, recompute=recompute))
    own = chosen_by_transformers(kind, rollouts)
    found = actor.logprobs(rollouts, OutputRequest(experts=True)).experts
    assert torch.equal(found.long().view_as(own).sort(-1).values, own.sort(-1).values)

    given = others_of(own, lab.hugging_face_model(kind).config.num_experts)
    batch = replace(rollouts, experts=given.flatten(1).short())
    expected, gradient = forced(kind, rollouts, given)
    MEASUREMENTS.take()
    outputs = actor.logprobs(batch, OutputRequest(temperature=TEMPERATURE)).primary
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    others, all_given = MEASUREMENTS.take().passes[-1].replayed
    assert all_given % given.numel() == 0, "every rank of a token counts it"
    assert 0.3 < others / all_given < 0.9
    actor.update(batch, [lab.minibatch(batch)], layout_lab.policy_objective(batch))
    assert gap(pool.gradients(), gradient) < GRADIENT_GAP


def forced(kind: str, rollouts: lab.TrainerBatch, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and gradients (float64) by transformers with these experts."""
    lengths = rollouts.input_lengths.tolist()
    by_row = {tuple(ids.tolist()): each for ids, each in zip(rollouts.unpadded(), given.split(lengths), strict=True)}
    now: list[Tensor] = []

    def experts(layer: int, best: Tensor) -> Tensor:
        # The last token of a row is not an input of the trainer; no output depends on its experts.
        return torch.cat([now[-1][:, layer], best[-1:]])

    def note(_: Any, args: Any, inputs: dict[str, Tensor]) -> None:
        now.append(by_row[tuple(inputs["input_ids"][0].tolist())])

    model, objective = lab.hugging_face_model(kind), layout_lab.policy_objective(rollouts)
    noted = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with routed(model, experts):
            _, gradient = lab.expected_gradients(kind, rollouts, objective)
            with torch.no_grad():
                return lab.token_outputs(model, rollouts, TEMPERATURE).primary, gradient
    finally:
        noted.remove()


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_reference_chooses_its_own_experts(pool: RankPool, model: Model, recompute: str) -> None:
    """The reference has the weights of the actor: with the given experts, it would be equal to the actor."""
    rollouts = lab.make_rollouts()
    actor = started(pool, settings_of(model, "qwen3-moe", "alone", recompute=recompute))
    given = others_of(chosen_by_transformers("qwen3-moe", rollouts), 4).flatten(1).short()
    batch, reading = replace(rollouts, experts=given), OutputRequest(temperature=TEMPERATURE)
    own = actor.logprobs(rollouts, reading).primary
    outputs = actor.logprobs(batch, replace(reading, reference=True, full_kl=True))
    assert outputs.reference is not None
    assert outputs.full_kl is not None
    FLOAT32.check(outputs.reference, own)
    assert float((outputs.primary - own).abs().max()) > 0.1
    assert float(outputs.full_kl[rollouts.mask].mean()) > 0.01
