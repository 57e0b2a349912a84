"""AdamW by Megatron-Core's optimizer, in two phases: `gradient_norm` inspects the gradients, and `step` changes the
weights."""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ppoctl.core.ports import OptimizerStep
from ppoctl.engines.megatron.host_optimizer import HostAdamW, accepting_device_gradients, to_host
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.offload import HostOffload
from ppoctl.engines.megatron.schedule import reduce_gradients


def with_gradient_buffers(
    models: Sequence[PackedModel], groups: ProcessGroupCollection, *, is_sharded: bool
) -> list[DistributedDataParallel]:
    """Return a rank's pipeline stages with buffers for the float32 gradients of the parameters that train. If the
    buffers are sharded, a distributed optimizer shards main weights and moments like them."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=is_sharded
    )
    stages = [DistributedDataParallel(model.config, settings, model, pg_collection=groups) for model in models]
    for model in models:
        model.config.finalize_model_grads_func = reduce_gradients
    no_sync = [stage.no_sync for stage in stages]
    models[0].config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return stages


def build_optimizer(
    stages: Sequence[DistributedDataParallel], dtype: torch.dtype, place: Literal["device", "cpu"] = "device"
) -> MegatronOptimizer:
    """Return AdamW over all of `stages`, with float32 main weights if the model is bfloat16. Moments are zero. If the
    stages' gradient buffers are sharded over the data ranks, main weights and moments are sharded too. `place` is
    where they are and where steps run.

    Hyperparameters (learning rate and so on) are passed with each step. Megatron-Core's standard groups exempt biases
    and norms from weight decay. Raises OutOfMemoryError if the host cannot pin the memory.
    """
    # Megatron-Core creates main weights on the device, where gradients and main weights may not fit together.
    gradients = HostOffload()
    gradients.offload("gradients", gradient_buffers(stages) if place == "cpu" else (), keep=False)
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=stages[0].ddp_config.use_distributed_optimizer,
    )
    with warnings.catch_warnings():
        # A rank whose parameters are all frozen has no optimizer.
        warnings.filterwarnings("ignore", message="WARNING: there is no optimizer on RANK")
        made = get_megatron_optimizer(config, list(stages), use_gloo_process_groups=config.use_distributed_optimizer)
    # If only experts train, Megatron-Core's optimizer of all other parameters is an object that cannot be saved.
    optimizer = ChainedOptimizer([part for part in _parts(made) if not part.is_stub_optimizer])
    for part in _parts(optimizer):
        for group in part.param_groups:
            group["fused"] = True  # one pass over the memory of a parameter instead of about ten
        # Moments exist from the start, so that a state saved before the first step has the same format.
        if place == "cpu":
            to_host(part, next(stages[0].parameters()).device)
            continue
        for group in part.param_groups:
            for parameter in group["params"]:
                part.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    gradients.reload("gradients")
    if stages[0].ddp_config.use_distributed_optimizer:
        _load_with_step_counts(optimizer)
        _save_without_parameters(optimizer)
    return optimizer


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return Megatron-Core's optimizers of one model: experts have a separate optimizer."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _load_with_step_counts(optimizer: MegatronOptimizer) -> None:
    """Make the distributed optimizer restore moments without the step count. Megatron-Core 0.16 restores moments by
    iterating over torch's complete Adam state, which includes the step count, although the count is already set. One
    kind of saved state does not contain the count, and could not be loaded without this change. The other kind
    contains the count before the load."""
    for split in _parts(optimizer):
        restore = split._set_main_param_and_optimizer_states

        @torch.no_grad()  # in float32 the main weights are the model's parameters
        def complete(parameter: Tensor, saved: dict[str, Tensor], split: Any = split, restore: Any = restore) -> None:
            held = split._get_main_param_and_optimizer_states(parameter)
            restore(parameter, {**saved, "step": held["step"]})

        split._set_main_param_and_optimizer_states = complete


def _save_without_parameters(optimizer: MegatronOptimizer) -> None:
    """Make the state of a distributed optimizer available on ranks where none of its parameters trains.
    Megatron-Core 0.16 requires a parameter, from which it takes the step count."""
    for split in _parts(optimizer):

        def groups_alone(split: Any = split, complete: Any = split.state_dict) -> dict[str, Any]:
            if split.optimizer.state:
                state: dict[str, Any] = complete()
                return state
            groups = [{key: of for key, of in group.items() if key != "params"} for group in split.param_groups]
            return {"optimizer": {"param_groups": groups}}

        split.state_dict = groups_alone


def gradient_buffers(stages: Sequence[DistributedDataParallel]) -> Iterator[Tensor]:
    """Yield the buffers in which the gradients of these stages accumulate."""
    for stage in stages:
        for buffer in (*stage.buffers, *stage.expert_parallel_buffers):
            yield buffer.grad_data


def held_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield main weights and moments that are on the device."""
    for part in _parts(optimizer):
        if isinstance(part.optimizer, HostAdamW):
            continue
        for group in part.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def sharded_state(
    optimizer: MegatronOptimizer, weights: Any, *, is_loading: bool, metadata: dict[str, Any]
) -> dict[Any, Any]:
    """Return Megatron-Core's sharded state of the optimizer of these sharded weights. Collective.

    Only the first rank's step count is saved. A rank whose parameters are all frozen has no step count of its own.
    """
    steps = _steps_taken(optimizer)
    if optimizer.config.use_distributed_optimizer:
        for split in _parts(optimizer):
            for group in split.param_groups if not split.optimizer.state else ():
                group["step"] = steps
    state: dict[Any, Any] = optimizer.sharded_state_dict(weights, is_loading, metadata=metadata)
    if not optimizer.config.use_distributed_optimizer:
        for part in _split_states(state):
            if steps and not is_loading:
                part.get("optimizer", part)["state"].setdefault("common_step", torch.tensor(steps))
            if _MAIN_WEIGHTS in part:
                # Lists of another length cannot be merged with those of a rank without parameters.
                part[_MAIN_WEIGHTS] = {number: group for number, group in enumerate(part[_MAIN_WEIGHTS]) if group}
    return state


def restore_empty_fields(saved: dict[Any, Any]) -> None:
    """Add empty fields that the format omits: the step count 0 of a state saved before the first optimizer step, and
    main weights of groups without a parameter on this rank."""
    for part in _split_states(saved):
        inner = part.get("optimizer", part)  # in bfloat16 it is nested, next to the main weights
        if "state" in inner:  # a distributed optimizer stores its step count elsewhere
            inner["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
        if inner is not part:
            found = part.get(_MAIN_WEIGHTS, {})
            part[_MAIN_WEIGHTS] = [found.get(number, []) for number in range(len(inner["param_groups"]))]


_MAIN_WEIGHTS = "fp32_from_fp16_params"
"""Megatron-Core's key of the main weights, a list per group of parameters."""


def _split_states(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of the optimizers of one model: experts have a separate optimizer."""
    return list(state.values()) if 0 in state else [state]


def _steps_taken(optimizer: MegatronOptimizer) -> float:
    """Return the number of steps that ranks count. Collective."""
    states = (state for part in _parts(optimizer) for state in part.optimizer.state.values())
    counts: list[float] = [0.0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(counts, float(next(states, {"step": 0.0})["step"]))
    return max(counts)


def own_step_counts(optimizer: MegatronOptimizer) -> None:
    """Give each parameter a separate step count. After a distributed optimizer is loaded, all parameters share one
    tensor, which would be incremented once per parameter."""
    for split in _parts(optimizer):
        for state in split.optimizer.state.values():
            state["step"] = state["step"].clone()


def blank_padding(state: Any) -> None:
    """Zero the padding between the parameters of a distributed optimizer's buffers, where Megatron-Core would save
    uninitialized memory. Equal states must give equal files."""
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
    """Return the 2-norm of all gradients. This also copies the gradients from the model's buffers to the main
    weights."""
    with accepting_device_gradients(_parts(optimizer)):
        found_inf = optimizer.prepare_grads()
    assert not found_inf, "without loss scaling, Megatron-Core does not check for infinities here"
    return float(optimizer.get_grad_norm())


@torch.no_grad()
def step(optimizer: MegatronOptimizer, settings: OptimizerStep, grad_norm: float) -> None:
    """Take one AdamW step with these settings; `grad_norm` is the result of `gradient_norm` and must be finite."""
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
