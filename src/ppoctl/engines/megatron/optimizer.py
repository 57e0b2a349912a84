"""AdamW through Megatron-Core's optimizer, taken apart: look at the gradients first, step afterwards."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from ppoctl.ports import OptimizerStep


def build_optimizer(stages: Sequence[DistributedDataParallel], dtype: torch.dtype) -> MegatronOptimizer:
    """AdamW over all of `stages`, with float32 main weights where the model is bfloat16; moments are zero. Main
    weights and moments are split over the data ranks where the stages' gradient buffers are.

    Its numbers (learning rate and so on) come with each step. Megatron-Core's standard groups exempt biases and
    norms from weight decay.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=stages[0].ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, list(stages), use_gloo_process_groups=config.use_distributed_optimizer)
    for part in _parts(optimizer):
        for group in part.param_groups:
            group["fused"] = True  # one pass over memory per parameter instead of about ten
            for parameter in group["params"]:
                # Moments exist from the start, so that a state saved before the first step looks like any other.
                part.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    if stages[0].ddp_config.use_distributed_optimizer:
        _load_with_step_counts(optimizer)
    return optimizer


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron-Core's optimizers of one model: experts have one of their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_with_step_counts(optimizer: MegatronOptimizer) -> None:
    """Megatron-Core 0.16 restores the moments of a split optimizer by going over all of torch's Adam state, step
    count included, which it has set before. One kind of state does not hand the count in, and could not be read
    without this; the other hands in what the optimizer counted before it was loaded."""
    for split in _parts(optimizer):
        restore = split._set_main_param_and_optimizer_states

        @torch.no_grad()  # in float32 the main weights are the model's own
        def complete(parameter: Tensor, saved: dict[str, Tensor], split: Any = split, restore: Any = restore) -> None:
            held = split._get_main_param_and_optimizer_states(parameter)
            restore(parameter, {**saved, "step": held["step"]})

        split._set_main_param_and_optimizer_states = complete


def gradient_buffers(stages: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """Where the gradients of these stages add up."""
    for stage in stages:
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
            yield buffer.grad_data


def held_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main weights and moments."""
    for part in _parts(optimizer):
        for group in part.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def own_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give each parameter a step count of its own. Loading a split optimizer leaves one tensor in all of them, which
    each parameter's step would then raise."""
    for split in _parts(optimizer):
        for state in split.optimizer.state.values():
            state["step"] = state["step"].clone()


def blank_padding(state: Any) -> None:
    """Zeros between the parameters of a split optimizer's buffers, where Megatron-Core saves whatever memory held:
    equal states are equal files."""
    if not isinstance(state, dict | list):
        return
    inside = list(state.values() if isinstance(state, dict) else state)
    is_padding = isinstance(state, dict) and "padding" in state and state["padding"].unwrap()
    for value in inside:
        if is_padding and isinstance(value, ShardedTensor):
            value.data.zero_()
        blank_padding(value)


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """2-norm of all gradients, which are thereby handed from the model's buffers to the main weights."""
    found_inf = optimizer.prepare_grads()
    assert not found_inf, "no loss scaling here, so nothing looks for infinities before this"
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def step(optimizer: MegatronOptimizer, settings: OptimizerStep, grad_norm: float) -> None:
    """One AdamW step with exactly these settings; `grad_norm` is what `gradient_norm` returned, and finite."""
    assert math.isfinite(grad_norm), "the caller checks before the weights change"
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * group["lr_mult"]
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        group["betas"] = (settings.beta1, settings.beta2)
        group["eps"] = settings.eps
    if settings.grad_clip > 0.0:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip_grad_by_total_norm_fp32(parameters, max_norm=settings.grad_clip, total_norm=grad_norm)
    optimizer.step_with_ready_grads()
