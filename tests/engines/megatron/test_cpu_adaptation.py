"""The CPU adaptation has no effect outside its context; inside, Megatron-Core finds a device."""

import os

import megatron_lab as lab
import pytest
import torch
from megatron.core import parallel_state

from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.process_group import ensure_process_group

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inert with CUDA")


def test_inside_megatron_device_cuda_maps_to_cpu():
    with megatron_device():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1.0], device="cuda").type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stream.record_event().synchronize()


def standing() -> tuple[object, ...]:
    cuda = torch.cuda
    return cuda.current_device, cuda.synchronize, cuda.Stream, cuda.current_stream, torch.distributed.all_gather


def test_megatron_device_restores_torch_even_after_error():
    before = standing()
    for fails in (False, True):
        try:
            with megatron_device(), megatron_device():
                assert torch.cuda.current_device is not before[0]
                assert torch.distributed.all_gather is not before[-1]
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert standing() == before
        assert torch.zeros(1).type() == "torch.FloatTensor"
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device="cuda")


def foreign_environment() -> dict[str, str]:
    """Unset the switches that Megatron-Core sets for Transformer Engine alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}


def test_trainer_leaves_no_global_side_effects(model, tmp_path):
    before = torch.cuda.current_device, torch.cuda.synchronize, torch.get_default_dtype()
    environment = foreign_environment()
    rollouts = lab.make_rollouts()
    generator = torch.random.get_rng_state()
    trainer = lab.actor(model("qwen2"), dtype="bfloat16")
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    lab.save(trainer, tmp_path)
    trainer.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert (torch.cuda.current_device, torch.cuda.synchronize, torch.get_default_dtype()) == before
    assert foreign_environment() == environment
    assert torch.is_grad_enabled()


def test_process_group_is_created_once():
    first = ensure_process_group(ParallelTable())
    second = ensure_process_group(ParallelTable())
    assert first.tp is second.tp
    assert first.dp_cp is second.dp_cp
    assert torch.distributed.get_world_size() == 1
    assert parallel_state.get_tensor_model_parallel_world_size() == 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ
