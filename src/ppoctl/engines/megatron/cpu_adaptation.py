"""Adaptation of Megatron-Core to machines without CUDA. This module contains all code for this purpose, and does
nothing if CUDA is available.

Megatron-Core's mathematics does not depend on the device, but the code around the mathematics does:
`torch.cuda.current_device()` as `device=`, literal `device="cuda"`, comparisons of `Tensor.type()` with
`"torch.cuda.FloatTensor"`, and a stream on which the counts of tokens per expert are copied to the host. Inside
`megatron_device()`, these calls work on the CPU, and gloo can gather tensors of different lengths. Outside it, torch
is unchanged, so other users of torch in the process (vLLM, imported earlier or later) are not affected. The
adaptation does not change numerical results.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ppoctl.core.machine.device import on_gpu


class _CpuInsteadOfCuda(TorchFunctionMode):
    """Mode in which `device="cuda"` in factory calls means the CPU, `Tensor.cuda()` does nothing, and `Tensor.type()`
    reports a CUDA type."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs and kwargs.get("device") == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **(kwargs or {}))


class _NoStream:
    """Substitute for a CUDA stream and its events on a CPU, on which all work is complete when a call returns."""

    def wait_stream(self, other: "_NoStream") -> None:
        pass

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        pass


def _token_counts(tensor: Any, *, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    """Replace Megatron-Core's `maybe_move_tensor_to_cpu`, which does not convert tensors that are on the CPU already.
    Collectives do not accept tensors as sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_all_gather = torch.distributed.all_gather


def _uneven_all_gather(tensors: list[Tensor], mine: Tensor, group: Any = None, **settings: Any) -> Any:
    """Replace torch's `all_gather` by a version for tensors that may differ in length."""
    if len({len(tensor) for tensor in tensors}) == 1:
        return _all_gather(tensors, mine, group=group, **settings)
    for rank, tensor in enumerate(tensors):
        if rank == torch.distributed.get_rank(group):
            tensor.copy_(mine)
        torch.distributed.broadcast(tensor, group=group, group_src=rank)
    return None


_RANDOM = "megatron.core.tensor_parallel.random"
_active = False


@contextmanager
def megatron_device() -> Iterator[None]:
    """Context in which Megatron-Core runs on this machine's device. It is reentrant, and does nothing if CUDA is
    available."""
    global _active
    if _active or on_gpu():
        yield
        return
    from megatron.core.transformer.moe import token_dispatcher

    _active = True
    cpu = torch.device("cpu")
    try:
        with (
            patch.object(torch.cuda, "current_device", lambda: cpu),
            patch.object(torch.cuda, "synchronize", lambda *_: None),
            patch.object(torch.cuda, "Stream", _NoStream),
            patch.object(torch.cuda, "current_stream", lambda *_: _NoStream()),
            patch.object(torch.cuda, "stream", lambda _: nullcontext()),
            patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _token_counts),
            patch.object(torch.distributed, "all_gather", _uneven_all_gather),
            # Activation recomputation saves the state of CUDA's random-number generator, which the models here do not
            # use.
            patch(f"{_RANDOM}._get_cuda_rng_state", lambda *_, **__: None),
            patch(f"{_RANDOM}._set_cuda_rng_state", lambda *_, **__: None),
            _CpuInsteadOfCuda(),
        ):
            yield
    finally:
        _active = False
