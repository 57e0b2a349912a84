"""Chunked log-probs equal the plain formula, forward and backward, within the memory of one chunk."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron import output_logprobs
from ppoctl.engines.megatron.logit_blocks import LogprobSettings
from ppoctl.engines.megatron.output_logprobs import token_logprobs
from tolerance import BFLOAT16, FLOAT32

NUM, HIDDEN, VOCABULARY = 23, 8, 57


def inputs(
    dtype: torch.dtype = torch.float32, width: int = HIDDEN, num: int = NUM, vocabulary: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocabulary, (num,), generator=generator)


def test_token_logprobs_of_two_ids_match_hand_computed_values():
    """Logits 0 and ln 3 give probabilities 1/4 and 3/4; at temperature 2, 1 and sqrt 3 over their sum."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[1.0], [3.0]]).log()
    found, entropy, *_ = token_logprobs(
        hidden, weight, torch.tensor([1]), LogprobSettings(OutputRequest(entropy=True), 4)
    )
    FLOAT32.check(found.exp(), torch.tensor([0.75]))
    FLOAT32.check(entropy, torch.tensor([-0.75, -0.25]) @ torch.tensor([[0.75], [0.25]]).log())
    found, *_ = token_logprobs(hidden, weight, torch.tensor([1]), LogprobSettings(OutputRequest(temperature=2.0), 4))
    FLOAT32.check(found.exp(), torch.tensor([3**0.5 / (1 + 3**0.5)]))


@pytest.mark.parametrize("chunk_tokens", [1, 5, 23, 64])
@pytest.mark.parametrize("block_elements", [1, 3 * VOCABULARY, 2**20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_chunked_logprobs_and_gradients_match_plain_formula(
    chunk_tokens, block_elements, temperature, with_entropy, softcap
):
    hidden, weight, targets = inputs()
    along, along_entropy = torch.randn(2, NUM, generator=torch.Generator().manual_seed(1))
    logits = hidden @ weight.T
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    log_p = (capped / temperature).log_softmax(-1)
    picked = log_p.gather(1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1) * with_entropy
    expected = torch.autograd.grad(along @ picked + along_entropy @ entropy, (hidden, weight))
    request = OutputRequest(temperature, entropy=with_entropy)
    settings = LogprobSettings(request, chunk_tokens, softcap, block_elements={"cpu": block_elements})
    found, found_entropy, *_ = token_logprobs(hidden, weight, targets, settings)
    FLOAT32.check(found, picked)
    assert (found_entropy is not None) == with_entropy
    loss = along @ found
    if found_entropy is not None:
        FLOAT32.check(found_entropy, entropy)
        loss = loss + along_entropy @ found_entropy
    for one, other in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        FLOAT32.check(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient_accumulates_in_float32_main_grad(dtype):
    """The weight has five rows, in bands of two. The temperature keeps all probabilities above 0."""
    width = output_logprobs.BAND_ELEMENTS // 2
    hidden, weight, targets = inputs(dtype, width, num=3, vocabulary=5)
    temperature = width**0.5
    settings = LogprobSettings(OutputRequest(temperature), 2)

    def total() -> torch.Tensor:
        return temperature * token_logprobs(hidden, weight, targets, settings)[0].sum()

    [expected] = torch.autograd.grad(total(), weight)
    assert float(expected.abs().amax(1).min()) > 0.1
    weight.main_grad = torch.ones(5, width)
    total().backward()
    assert weight.grad is None
    (FLOAT32 if dtype == torch.float32 else BFLOAT16).check(weight.main_grad - 1, expected)


class LargestTensor(TorchDispatchMode):
    """Records the peak bytes of live tensors of at least `at_least` elements."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.alive, self.peak, self.largest = at_least, {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= 4 * self.at_least:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(tensor, self.alive.pop, key, None)
                self.largest = max(self.largest, storage.nbytes())
                self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_token_logprobs_memory_is_bounded_by_one_chunk():
    """2,000 tokens x 512 ids in chunks of 64: no tensor is larger than one chunk's logits (or the inputs), and the
    float32 work on them is done in blocks of 4 rows. Tensors with one number per token do not count."""
    hidden = torch.randn(2000, 4, requires_grad=True)
    weight = torch.randn(512, 4, requires_grad=True)
    weight.main_grad = torch.zeros(512, 4)
    chunk_bytes = 64 * 512 * 4
    with LargestTensor(at_least=4 * 512) as seen:
        settings = LogprobSettings(OutputRequest(entropy=True), 64, block_elements={"cpu": 4 * 512})
        logprobs, entropy, *_ = token_logprobs(hidden, weight, torch.zeros(2000, dtype=torch.int64), settings)
        (logprobs.sum() + entropy.sum()).backward()
    assert seen.largest == chunk_bytes
    assert seen.peak < 2 * chunk_bytes
