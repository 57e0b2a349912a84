"""Log-probs, entropies and the KL from a reference belong to the filtered distribution, compared with float64
formulas that sort the whole vocabulary; so do their gradients."""

import math

import pytest
import torch
from torch import Tensor

from ppoctl.core.batch.grid import pack
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.filters import thresholds
from ppoctl.engines.megatron.logit_blocks import ExcludedTokens, LogprobSettings, with_own_columns
from ppoctl.engines.megatron.output_logprobs import FrozenOutputs, PositionOutputs, token_logprobs
from ppoctl.engines.megatron.packed_input import ReadSettings, packed_input

NUM, HIDDEN, VOCABULARY = 23, 8, 57
FILTERS = {
    "none": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "all": {"top_p": 0.7, "top_k": 6, "min_p": 0.02},
    "one id": {"top_k": 1},
    "more than there are": {"top_k": 1000, "top_p": 0.999999},
}


def kept(logits: Tensor, request: OutputRequest) -> Tensor:
    """Return which ids are kept, in vLLM's order: min-p, top-k, then top-p of the rest. [n V] bool"""
    probabilities = logits.softmax(-1)
    stay = probabilities >= request.min_p * probabilities.amax(-1, keepdim=True)
    left = logits.masked_fill(~stay, -torch.inf)
    if request.top_k is not None:
        kth = left.topk(min(request.top_k, logits.shape[1]), -1).values[:, -1:]
        left = left.masked_fill(left < kth, -torch.inf)
    ordered, order = left.softmax(-1).sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # mass of the more likely ids
    stays = (before < request.top_p) & (ordered > 0)
    return torch.zeros_like(stays).scatter(1, order, stays)


def expected(
    logits: Tensor, others: Tensor, targets: Tensor, request: OutputRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-prob of the target, the entropy, and the KL from the reference's unfiltered distribution."""
    x = logits / request.temperature
    stay = kept(x.detach(), request)
    # The sampled id is kept, and all that are more likely.
    stay |= x.detach() >= x.detach().gather(1, targets[:, None])
    log_p = x.masked_fill(~stay, -1e300).log_softmax(-1)
    p = log_p.exp()
    log_q = (others / request.temperature).log_softmax(-1)
    entropy, kl = -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy, kl


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(NUM, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) * 0.7).to(dtype)
    moved = weight + 0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    targets = torch.randint(0, VOCABULARY, (NUM,), generator=generator)
    return hidden, weight, 0.5 * hidden + 0.5 * other, moved, targets


def request_of(filters: str, **more: float) -> OutputRequest:
    return OutputRequest(**{"temperature": 0.8, "entropy": True, "full_kl": True, **FILTERS[filters], **more})  # type: ignore[arg-type]


def by_the_engine(settings: LogprobSettings, hidden: Tensor, weight: Tensor) -> PositionOutputs:
    _, _, other, moved, targets = inputs(torch.float32)
    return token_logprobs(hidden, weight, targets, settings, None, FrozenOutputs(other, moved))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("block_elements", [1, 6 * VOCABULARY, 2**20])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_filtered_logprobs_and_gradients_match_float64_formula(filters, block_elements, softcap):
    """Within 1e-6 in values: float32 arithmetic compared with float64 over all ids at once."""
    request = request_of(filters)
    hidden, weight, other, moved, targets = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()

    def capped(logits: Tensor) -> Tensor:
        return logits if softcap is None else softcap * (logits / softcap).tanh()

    wanted = expected(capped(hidden @ weight.T), capped(other @ moved.T), targets, request)
    along = torch.randn(3, NUM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slopes = torch.autograd.grad(sum(a @ w for a, w in zip(along, wanted, strict=True)), (hidden, weight))
    leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    settings = LogprobSettings(request, 5, softcap, block_elements={"cpu": block_elements})
    found = by_the_engine(settings, *leaves)
    for one, of_it in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(one.double(), of_it.detach(), atol=2e-6, rtol=1e-6)
    loss = sum(a.float() @ one for a, one in zip(along, found[:3], strict=True))
    for one, of_it in zip(torch.autograd.grad(loss, leaves), slopes, strict=True):
        assert (one - of_it).norm() <= 1e-5 * of_it.norm()


@pytest.mark.parametrize("filters", ["none", "all"])
def test_excluded_ids_are_masked_except_as_target(filters):
    """They are excluded before the filters, except the target. One of them is on another rank."""
    request = request_of(filters)
    hidden, weight, other, moved, targets = inputs()
    hidden.requires_grad_()
    at, ids = torch.arange(NUM) < 12, torch.tensor([3, 11, 40])
    targets[0] = 11
    closed = at[:, None] & torch.zeros(NUM, VOCABULARY, dtype=torch.bool).index_fill(1, ids, value=True)
    closed = closed.scatter(1, targets[:, None], value=False)
    logits = (hidden @ weight.T).masked_fill(closed, -1e9)
    wanted = expected(logits, other @ moved.T, targets, request)
    along = torch.randn(3, NUM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope = torch.autograd.grad(sum(a @ w for a, w in zip(along, wanted, strict=True)), hidden)[0]
    leaf = hidden.detach().float().requires_grad_()
    settings = LogprobSettings(
        request, 5, excluded=ExcludedTokens(at, torch.cat([ids, torch.tensor([VOCABULARY + 7])]))
    )
    frozen = FrozenOutputs(other.float(), moved.float())
    found = token_logprobs(leaf, weight.float(), targets, settings, None, frozen)
    for one, of_it in zip(found[:3], wanted, strict=True):
        torch.testing.assert_close(one.double(), of_it.detach(), atol=2e-6, rtol=1e-6)
    [ours] = torch.autograd.grad(sum(a.float() @ one for a, one in zip(along, found[:3], strict=True)), leaf)
    assert (ours - slope).norm() <= 1e-5 * slope.norm()
    free = token_logprobs(leaf, weight.float(), targets, LogprobSettings(request, 5), None, frozen).outputs
    assert (found.outputs[:12] - free[:12]).abs().max() > 1e-3
    assert torch.equal(found.outputs[12:], free[12:])


def test_rank_excludes_only_ids_of_its_own_columns():
    barred = ExcludedTokens(torch.ones(2, dtype=torch.bool), torch.tensor([3, 11, 40]))
    found = with_own_columns(LogprobSettings(OutputRequest(), 5, excluded=barred), 10, 20).excluded
    assert found is not None
    assert found.ids.tolist() == [1]


def test_end_tokens_are_excluded_before_min_new_tokens():
    """Two rows of two and of four tokens, of which three are early."""
    sequences = Sequences(
        torch.tensor([5, 6, 7], dtype=torch.int32),
        torch.tensor([1, 2]),
        torch.tensor([[8, 9, 0, 0], [3, 3, 3, 3]], dtype=torch.int32),
        torch.tensor([2, 4]),
    )
    packed = pack(sequences, torch.arange(2))
    reading = ReadSettings(torch.device("cpu"), OutputRequest(min_new_tokens=3), (1, 9))
    found = packed_input(packed, reading).excluded
    assert found is not None
    assert (found.at.tolist(), found.ids.tolist()) == ([True, True, True, True, True, False], [1, 9])
    assert packed_input(packed, ReadSettings(torch.device("cpu"), OutputRequest())).excluded is None


@pytest.mark.parametrize("filters", FILTERS)
def test_omitted_outputs_do_not_change_logprobs(filters):
    hidden, weight, _, _, targets = inputs(torch.float32)
    all_of_it = by_the_engine(LogprobSettings(request_of(filters), 5), hidden, weight)
    alone = token_logprobs(
        hidden, weight, targets, LogprobSettings(request_of(filters, entropy=False, full_kl=False), 5)
    )
    assert torch.equal(alone.outputs, all_of_it.outputs)
    assert alone.entropy is alone.full_kl is None


def test_full_kl_of_model_to_itself_is_zero():
    hidden, weight, _, _, targets = inputs(torch.float32)
    settings = LogprobSettings(OutputRequest(full_kl=True), 5)
    found = token_logprobs(hidden, weight.requires_grad_(), targets, settings, None, FrozenOutputs(hidden, weight))
    assert found.full_kl is not None
    assert found.full_kl.abs().max() < 1e-6
    [slope] = torch.autograd.grad(found.full_kl.sum(), weight)
    assert slope.abs().max() < 1e-5


def test_full_kl_of_filter_equals_minus_log_kept_mass():
    """KL(p || q) >= -log q(kept) (the data processing inequality), here with p filtered from q itself: equality."""
    hidden, weight, _, _, _ = inputs(torch.float32)
    likeliest = (hidden @ weight.T).argmax(-1)
    request = OutputRequest(top_k=5, full_kl=True)
    found = token_logprobs(
        hidden, weight, likeliest, LogprobSettings(request, 5), None, FrozenOutputs(hidden, weight)
    )
    q = (hidden @ weight.T).double().softmax(-1)
    torch.testing.assert_close(found.full_kl.double(), -q.topk(5, -1).values.sum(-1).log(), atol=2e-6, rtol=0)


def test_filter_thresholds_match_hand_computed_probs():
    """Probabilities 1/2, 1/4, 1/8, 1/8. top_p 0.7 keeps the first two, 2/3 and 1/3; top_p 0.5 only the first; min_p
    0.3 of 1/2 is 0.15: the first two; with top_k 3 the third and fourth tie, and both are kept."""
    logits = torch.tensor([[1 / 2, 1 / 4, 1 / 8, 1 / 8]]).log()

    def smallest(**filters: float) -> float:
        return math.exp(float(thresholds(logits, OutputRequest(**filters), num_ids=4, group=None)))  # type: ignore[arg-type]

    assert 1 / 8 < smallest(top_p=0.7) <= 1 / 4 + 1e-6
    assert 1 / 4 < smallest(top_p=0.499) <= 1 / 2 + 1e-6
    assert smallest(top_p=0.9) <= 1 / 8 + 1e-6
    assert smallest(min_p=0.3) == pytest.approx(0.15)
    assert smallest(top_k=3) == pytest.approx(1 / 8)
    assert smallest(top_k=9) == 0.0
    # The first of the two ids that top_k keeps (2/3 and 1/3) has mass 0.6.
    assert 1 / 4 < smallest(top_k=2, top_p=0.6) <= 1 / 2 + 1e-6
    assert 1 / 8 < smallest(top_k=2, top_p=0.7) <= 1 / 4 + 1e-6


def test_filtered_out_target_is_kept_with_likelier_ids():
    """Probabilities 1/2, 1/4, 1/8, 1/8 and top_k 1: the second has 1/4 of 3/4."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[1 / 2], [1 / 4], [1 / 8], [1 / 8]]).log()
    settings = LogprobSettings(OutputRequest(top_k=1, entropy=True), 4)
    found = token_logprobs(hidden, weight, torch.tensor([1]), settings)
    torch.testing.assert_close(found.outputs.exp(), torch.tensor([1 / 3]))
    found = token_logprobs(hidden, weight, torch.tensor([0]), settings)
    torch.testing.assert_close(found.outputs, torch.zeros(1))
    torch.testing.assert_close(found.entropy, torch.zeros(1))
