"""Fused kernels: the same function as plain ones, and as float64. `test_recompute.py` counts what they keep. Only
the slow test compiles. Not verified: compiled code on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import megatron_lab as lab
import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl

from fakes.components import fake_recipe
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.logit_blocks import ExcludedTokens, LogprobSettings, VocabularyShard, fused_statistics
from ppoctl.engines.megatron.output_logprobs import FrozenOutputs, token_logprobs
from tolerance import BFLOAT16, FLOAT32


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_fused_activation_agrees_with_float64(dtype, level):
    """silu(gate) * up, with a weight per token and without, and all gradients."""
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(size, generator=generator).mul(3).to(dtype) for size in ((7, 22), (7, 1), (7, 11))]
    for is_weighted in (False, True):
        inputs, weights = (each.clone().requires_grad_() for each in given[:2])
        exact, exact_weights = (each.double().requires_grad_() for each in given[:2])
        found = weighted_bias_swiglu_impl(inputs, None, weights) if is_weighted else bias_swiglu_impl(inputs, None)
        gate, up = exact.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up * (exact_weights if is_weighted else 1)
        found.backward(given[2])
        expected.backward(given[2].double())
        level.check(found, expected)
        level.check(inputs.grad, exact.grad)
        if is_weighted:
            level.check(weights.grad, exact_weights.grad)


@pytest.mark.parametrize(
    ("dtype", "softcap", "with_entropy", "temperature", "level"),
    [
        (torch.float32, None, False, 1.0, FLOAT32),
        (torch.float32, 1.5, True, 0.6, FLOAT32),
        (torch.bfloat16, None, True, 1.3, BFLOAT16),
    ],
)
def test_fused_logprobs_and_gradients_agree_with_float64(dtype, softcap, with_entropy, temperature, level):
    """29 positions in chunks of 13, of which blocks have five rows and fewer. The weight has 61 of 64 ids."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(size, generator=generator).to(dtype) for size in ((29, 8), (64, 8)))
    targets = torch.randint(0, 61, (29,), generator=generator)
    along, along_entropy = torch.randn(2, 29, generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    # The logits are rounded to the dtype of the model before anything else.
    product = exact[0] @ exact[1][:61].T
    logits = product + (product.to(dtype).double() - product).detach()
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    log_p = (capped / temperature).log_softmax(-1)
    picked, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (along.double() @ picked + along_entropy.double() @ entropy * with_entropy).backward()
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    weight.main_grad = torch.zeros(64, 8)
    request = OutputRequest(temperature, entropy=with_entropy)
    settings = LogprobSettings(request, 13, softcap, block_elements={"cpu": 5 * 64}, fused=True)
    found = token_logprobs(hidden, weight, targets, settings, VocabularyShard(0, 61, None))
    loss = along @ found.outputs + (along_entropy @ found.entropy if with_entropy else 0)
    loss.backward()
    FLOAT32.check(found.outputs, picked)
    if with_entropy:
        FLOAT32.check(found.entropy, entropy)
    level.check(hidden.grad, exact[0].grad)
    level.check(weight.main_grad, exact[1].grad)


@pytest.mark.parametrize("request_", [OutputRequest(top_k=3), OutputRequest(full_kl=True), OutputRequest()])
def test_filters_reference_and_excluded_ids_are_plain(request_):
    """Fused and plain settings give the same bits, because fused kernels exist for none of the three."""
    generator = torch.Generator().manual_seed(7)
    hidden, weight, other = (torch.randn(size, generator=generator) for size in ((9, 4), (31, 4), (31, 4)))
    reference = FrozenOutputs(hidden, other) if request_.full_kl else None
    barred = None if reference or request_.is_filtered else ExcludedTokens(torch.arange(9) < 4, torch.tensor([3, 30]))
    targets = torch.randint(0, 31, (9,), generator=generator)
    found = [
        token_logprobs(
            hidden, weight, targets, LogprobSettings(request_, 4, excluded=barred, fused=fused), None, reference
        )
        for fused in (True, False)
    ]
    assert torch.equal(found[0].outputs, found[1].outputs)
    assert request_.full_kl or not torch.equal(
        found[0].outputs, (hidden @ weight.T).log_softmax(-1)[range(9), targets]
    )


def test_fused_statistics_of_ids_that_another_rank_has():
    """Logits 0, ln 2 and ln 5: the largest is ln 5, and the sum of exp(x - x*) is (1 + 2 + 5) / 5."""
    logits = torch.tensor([[1.0, 2.0, 5.0], [5.0, 2.0, 1.0]]).log()
    peak, z, moment, picked = fused_statistics(
        logits, torch.tensor([1, 3]), temperature=1.0, softcap=None, with_entropy=True
    )
    FLOAT32.check(peak, torch.tensor([5.0, 5.0]).log())
    FLOAT32.check(z, torch.tensor([1.6, 1.6]))
    FLOAT32.check(moment, (torch.tensor([1.0, 1.0]) * torch.tensor(0.2).log() + 2 * torch.tensor(0.4).log()) / 5)
    assert picked.tolist() == [pytest.approx(torch.tensor(0.4).log().item()), -torch.inf]


COMPILED = """
import torch
from ppoctl.engines.megatron import logit_blocks as blocks

torch._dynamo.config.disable = False  # `import_megatron` disables the compiler on a CPU
generator = torch.Generator().manual_seed(2)
logits = torch.randn(13, 61, generator=generator).mul(3).bfloat16()
places = torch.randint(-3, 64, (13,), generator=generator)
given = places, *torch.randn(4, 13, generator=generator)
for values in ((1.3, 2.5, True), (1.0, None, False)):
    scaling = dict(zip(("temperature", "softcap", "with_entropy"), values))
    found = torch.compile(blocks.fused_statistics)(logits, places, **scaling)
    torch.testing.assert_close(found, blocks.fused_statistics(logits, places, **scaling))
    changed = [logits.clone(), logits.clone()]
    torch.compile(blocks.fused_gradient)(changed[0], given, **scaling)
    blocks.fused_gradient(changed[1], given, **scaling)
    torch.testing.assert_close(*changed)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"], dict(torch._dynamo.utils.counters["graph_break"]))
"""


@pytest.mark.slow
def test_compiled_logprobs_agree_with_those_that_are_not_compiled(tmp_path):
    """Four graphs: two functions with two scalings, each in one piece."""
    disabled = {"TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"}  # for all other tests
    environment = {name: value for name, value in os.environ.items() if name not in disabled}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=500
    )
    assert (ended.stdout, ended.returncode) == ("4 {}\n", 0), ended.stderr


@pytest.mark.parametrize(
    ("kind", "role", "dtype", "level"),
    [
        ("qwen2", "actor", "float32", FLOAT32),
        ("qwen2", "critic", "bfloat16", BFLOAT16),
        ("qwen2-moe-mixed", "actor", "float32", FLOAT32),
        ("deepseek-v3-low-rank", "critic", "float32", FLOAT32),
    ],
)
def test_update_with_fused_kernels_has_the_gradients_of_plain_ones(model, kind, role, dtype, level):
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)
    plain = getattr(lab, role)(model(kind), dtype=dtype)
    fused = lab.started(replace(plain.settings, kernels="fused"))
    results = [trainer.update(rollouts, [lab.minibatch(rollouts)], objective)[0] for trainer in (fused, plain)]
    level.check(results[0].outputs.primary, results[1].outputs.primary)
    lab.check_all(level, lab.gradients_of(fused), lab.gradients_of(plain))
    assert sum(float(tensor.abs().sum()) for tensor in lab.gradients_of(plain).values()) > 0.1


def test_each_role_uses_its_own_kernels():
    recipe = fake_recipe(critic={"optimizer": {"lr": 1.0}, "kernels": "fused"})
    assert [trainer_settings(recipe, role).kernels for role in ("actor", "critic")] == ["plain", "fused"]
