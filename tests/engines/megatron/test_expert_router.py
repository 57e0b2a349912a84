"""Routing of tokens to experts, with numbers that can be checked by hand."""

from pathlib import Path
from types import SimpleNamespace

import megatron_lab as lab
import pytest
import torch

from ppoctl.core.measured import MEASUREMENTS
from ppoctl.engines.megatron.router import SigmoidRouter, SoftmaxRouter
from ppoctl.models.shape import SigmoidRouting
from tolerance import EXACT, FLOAT32

FREE = {
    "experts_of": lambda best: best,
    "counted": lambda chosen: chosen,
    "balanced": lambda weights, *_: weights,
}
"""Methods of a router to which no experts are given, and that is not balanced."""


def route(logits: torch.Tensor, *, topk: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens with these logits, `[tokens, experts]`."""
    router = SimpleNamespace(num_experts=logits.shape[1], topk=topk, renormalise=renormalise, **FREE)
    return SoftmaxRouter.routing(router, logits[:, None])


@pytest.mark.parametrize(
    ("renormalise", "weights"), [(False, [[0.0, 0.4, 0.0, 0.3]]), (True, [[0.0, 4 / 7, 0.0, 3 / 7]])]
)
def test_router_picks_two_most_likely_experts(renormalise, weights):
    probs, chosen = route(torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log(), topk=2, renormalise=renormalise)
    FLOAT32.check(probs, torch.tensor(weights))
    assert chosen.tolist() == [[False, True, False, True]]


def test_router_chooses_experts_before_bfloat16_rounding():
    """Probabilities 0.49975 and 0.50025 are both 0.5 in bfloat16, where the first expert would win."""
    probs, chosen = route(torch.tensor([[0.0, 0.001]], dtype=torch.bfloat16), topk=1, renormalise=False)
    assert chosen.tolist() == [[False, True]]
    EXACT.check(probs, torch.tensor([[0.0, 0.5]], dtype=torch.bfloat16))


def test_routing_does_not_depend_on_other_tokens():
    tokens = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    probs, chosen = route(tokens, topk=3, renormalise=True)
    for row in (0, 17, 49):
        alone = route(tokens[row : row + 1], topk=3, renormalise=True)
        EXACT.check(alone[0][0], probs[row])
        EXACT.check(alone[1][0], chosen[row])


def route_by_sigmoid(scores, bias, *, groups=1, groups_per_token=1, topk=2, renormalise=True, scale=1.0):
    """Route one token with these scores, each the sigmoid of a logit."""
    how = SigmoidRouting(groups, groups_per_token, scale)
    router = SimpleNamespace(num_experts=len(scores), topk=topk, renormalise=renormalise, how=how, **FREE)
    router.expert_bias = torch.tensor(bias)
    probs, chosen = SigmoidRouter.routing(router, torch.tensor([[scores]]).logit())
    return probs[0], chosen[0].tolist()


def test_bias_selects_experts_and_unbiased_score_weights_them():
    probs, chosen = route_by_sigmoid([0.1, 0.2, 0.4, 0.3], [0.9, 0.0, 0.0, 0.0])
    assert chosen == [True, False, True, False]
    FLOAT32.check(probs, torch.tensor([0.2, 0.0, 0.8, 0.0]))


@pytest.mark.parametrize(
    ("renormalise", "weights"), [(False, [0.0, 0.5, 1.0, 0.0]), (True, [0.0, 2.5 / 3, 5 / 3, 0.0])]
)
def test_sigmoid_routing_scales_expert_weights(renormalise, weights):
    probs, _ = route_by_sigmoid([0.1, 0.2, 0.4, 0.05], [0.0] * 4, renormalise=renormalise, scale=2.5)
    FLOAT32.check(probs, torch.tensor(weights))


def test_group_score_is_sum_of_its_two_best_experts():
    """0.5 + 0.5 beat the single best, 0.9 + 0.05 + 0.04; then only experts of that group are chosen."""
    scores = [0.9, 0.05, 0.04, 0.5, 0.5, 0.01]
    _, chosen = route_by_sigmoid(scores, [0.0] * 6, groups=2, topk=2)
    assert chosen == [False, False, False, True, True, False]
    _, chosen = route_by_sigmoid(scores, [0.06, 0.0, 0.0, 0.0, 0.0, 0.0], groups=2, topk=3)
    assert chosen == [True, True, True, False, False, False]


def test_other_groups_are_excluded_even_if_scores_are_negative():
    """A bias may push every score of the best group below 0, so that a mask of zeros would win."""
    _, chosen = route_by_sigmoid([0.3, 0.3, 0.1, 0.1], [-1.0] * 4, groups=2, topk=2)
    assert chosen == [True, True, False, False]


def test_router_computes_logits_in_float32():
    """1 + 2^-9 is 1 in bfloat16."""
    router = SimpleNamespace(weight=torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16))
    logits = SigmoidRouter.gating(router, torch.ones(1, 1, 2, dtype=torch.bfloat16))
    EXACT.check(logits, torch.tensor([[[1 + 2.0**-9]]]))


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen2-moe"])
def test_softmax_routing_of_fixture_has_no_near_ties(kind):
    """The gap between the last chosen and the first rejected expert is more than 1e-4 in probability for every token
    and layer: a hundred times the effect of rounding."""
    hugging_face, rollouts = lab.hugging_face_model(kind), lab.make_rollouts()
    margins = []
    for sequence in rollouts.unpadded():
        with torch.no_grad():
            layers = hugging_face(input_ids=sequence[None], output_router_logits=True).router_logits
        for logits in layers:
            likely = logits.softmax(-1).sort(dim=-1, descending=True).values
            margins.append((likely[:, 1] - likely[:, 2]).min())
    assert torch.stack(margins).min() > 1e-4


@pytest.mark.parametrize("kind", ["deepseek-v3", "deepseek-v3-low-rank"])
def test_sigmoid_routing_of_fixture_has_no_near_ties(kind):
    """The gap between the last chosen and the first rejected group, and between experts, is more than 1e-3 for every
    token and layer; and the bias and the groups change most choices."""
    hugging_face, rollouts = lab.hugging_face_model(kind), lab.make_rollouts()
    biases = [tensor for name, tensor in hugging_face.named_buffers() if name.endswith("e_score_correction_bias")]
    margins, changed = [], []
    for sequence in rollouts.unpadded():
        with torch.no_grad():
            layers = hugging_face(input_ids=sequence[None], output_router_logits=True).router_logits
        for logits, bias in zip(layers, biases, strict=True):
            pairs = (logits.sigmoid() + bias).view(-1, 4, 2)
            groups = pairs.sum(-1).sort(dim=-1, descending=True)
            margins.append((groups.values[:, 1] - groups.values[:, 2]).min())
            taken = pairs.gather(1, groups.indices[:, :2, None].expand(-1, -1, 2)).flatten(1)
            likely = taken.sort(dim=-1, descending=True).values
            margins.append((likely[:, 2] - likely[:, 3]).min())
            plain = logits.sigmoid().topk(3).values.sum(-1)
            weights = taken.topk(3).values.sum(-1)
            changed.append((plain - weights).abs() > 1e-3)
    assert torch.stack(margins).min() > 1e-3
    assert torch.cat(changed).float().mean() > 0.5


def test_loads_of_experts_are_those_of_transformers_routers(tmp_path: Path):
    """Each layer counts the tokens that a pass reads: all of a sequence but the last. A second reading has none."""
    hugging_face, rollouts = lab.hugging_face_model("qwen3-moe"), lab.make_rollouts()
    expected: dict[int, torch.Tensor] = {}
    for sequence in rollouts.unpadded():
        with torch.no_grad():
            layers = hugging_face(input_ids=sequence[None, :-1], output_router_logits=True).router_logits
        for number, logits in enumerate(layers, start=1):
            chosen = torch.zeros_like(logits).scatter(1, logits.topk(2).indices, 1.0).sum(0)
            expected[number] = expected.get(number, 0) + chosen
    actor = lab.actor(lab.model_folder("qwen3-moe", tmp_path / "model"))
    lab.scores(actor, rollouts)
    taken = MEASUREMENTS.take().passes[-1].expert_loads
    assert {layer: list(counts) for layer, counts in taken.items()} == {
        layer: counts.int().tolist() for layer, counts in expected.items()
    }
    assert all(not usage.expert_loads for usage in actor.ranks.call("take_usage"))
