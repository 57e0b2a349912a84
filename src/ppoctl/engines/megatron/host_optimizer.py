"""AdamW on the host: main weights and moments are in pinned host memory, and the optimizer step runs there.

Megatron-Core's optimizer remains, with its parameter groups, gradient norm, clipping and saved states. Only torch's
AdamW inside of it is replaced. A step takes the parameters piece by piece:

    gradient  ->  pinned memory  ->  AdamW on main weight and moments  ->  pinned memory  ->  weight
    device        host               host                                  host               device

While the host computes a piece, the device sends the next gradient and receives the last weight. Megatron-Core's
`HybridDeviceOptimizer` has a similar purpose, but cannot run without CUDA.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ppoctl.core.activity import track_items
from ppoctl.engines.megatron.offload import side_by_side
from ppoctl.engines.megatron.pinned_memory import PinnedMemory, wait_for_submitted

PIECE = 2**23
"""Largest number of elements of a parameter that one piece has. torch's AdamW on a CPU vectorizes over cache lines.
The result does not depend on the cuts, because this number is a multiple of a cache line."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def to_host(part: Any, device: torch.device, piece: int = PIECE) -> None:
    """Move one of Megatron-Core's optimizers to the host: its float32 main weights, if it has them, and new moments.
    `device` is that of the model. Raises OutOfMemoryError if the host cannot pin the memory."""
    part.optimizer = HostAdamW(part.param_groups, _weights_of(part), device, piece)
    # `HostAdamW` returns the weights to the model. Megatron-Core would copy them a second time.
    part._copy_main_params_to_model_params = lambda: None


@contextmanager
def accepting_device_gradients(parts: Iterable[Any]) -> Iterator[None]:
    """Context in which the main weights of these optimizers accept gradients on the device, where they are reduced
    and clipped. torch requires parameter and gradient on the same device. The main weights cannot be read here."""
    adams = [part.optimizer for part in parts if isinstance(part.optimizer, HostAdamW)]
    hosts = {main: main.data for adam in adams for main in adam.weights}
    for adam in adams:
        for main, weight in adam.weights.items():
            # An expanded scalar has the shape, but takes no memory of the device.
            main.data = torch.zeros((), dtype=main.dtype, device=weight.device).expand(main.shape)
    try:
        yield
    finally:
        for main, host in hosts.items():
            main.data = host


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW with its state in host memory, for parameters with gradients on the device."""

    def __init__(
        self, groups: list[dict[str, Any]], weights: dict[Tensor, Tensor], device: torch.device, piece: int = PIECE
    ) -> None:
        """Move those parameters of `groups` to the host for which `weights` has the weight of the model that is
        written after a step. A parameter without an entry is itself a weight of the model, and is on the host only
        during its step. Raises OutOfMemoryError."""
        super().__init__([torch.empty(0)], fused=True)
        self.param_groups = groups  # torch's constructor rejects parts of parameters, which a sharded optimizer has
        self.weights = weights
        parameters = [parameter for group in groups for parameter in group["params"]]
        tensors = {parameter: [*_MOMENTS, *(["main"] if parameter in weights else [])] for parameter in parameters}
        sizes = [4 * parameter.numel() for parameter, names in tensors.items() for _ in names]
        offsets = side_by_side(sizes)
        self._memory = PinnedMemory(offsets[-1], device, "main weights and moments of the optimizer")
        offset = iter(offsets)
        for parameter, names in tensors.items():
            state = {name: self._tensor(next(offset), parameter.shape) for name in names}
            if "main" in state:
                parameter.data = state.pop("main").copy_(parameter)
            self.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **state}
        self._staging = _Staging(device, min(piece, max((each.numel() for each in parameters), default=0)))

    def _tensor(self, offset: int, shape: torch.Size) -> Tensor:
        return self._memory.bytes[offset : offset + 4 * shape.numel()].view(torch.float32).view(shape)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step with the gradients of all parameters, and copy the results to the weights of the model."""
        assert closure is None, "gradients are ready"
        pieces = list(self._pieces())
        wait = self._staging.fetch(pieces, 0)
        for number, piece in track_items(pieces, "AdamW on the CPU, part"):
            wait_for_next = self._staging.fetch(pieces, number + 1)
            wait()
            self._staging.step(piece, number)
            wait = wait_for_next
        for state in self.state.values():
            state["step"] += 1

    def _pieces(self) -> Iterator["_Piece"]:
        size = self._staging.size
        for group in self.param_groups:
            for parameter in group["params"]:
                state, is_separate = self.state[parameter], parameter in self.weights
                gradient, weight = parameter.grad, self.weights.get(parameter, parameter)
                for start in range(0, parameter.numel(), size):
                    cut = partial(_cut, start=start, size=size)
                    moments = tuple(cut(state[name]) for name in _MOMENTS)
                    main = cut(parameter) if is_separate else None
                    yield _Piece(group, state["step"], cut(gradient), cut(weight), main, moments)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state into the memory of this optimizer. torch would put moments on the device of the parameters.
        Raises KeyError or ValueError if the state has other parameters."""
        loaded = []
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                own, other = self.state[parameter], state_dict["state"][number]
                for name in _MOMENTS:
                    own[name].copy_(other[name])
                own["step"] = other["step"].to("cpu", torch.float32, copy=True)
            loaded.append({**saved, "params": group["params"]})
        self.param_groups = loaded


@dataclass(frozen=True)
class _Piece:
    """A range of the elements of a parameter."""

    group: dict[str, Any]
    steps: Tensor
    """Number of steps that the parameter has taken."""
    gradient: Tensor
    weight: Tensor
    """Weight of the model, on the device."""
    main: Tensor | None
    """Main weight. None: it is `weight`."""
    moments: tuple[Tensor, ...]


class _Staging:
    """Pinned memory between device and host, for two pieces: the one of the host's step and its neighbor."""

    def __init__(self, device: torch.device, size: int) -> None:
        """`size` is the largest number of elements of a piece."""
        self._device = device
        self.size = max(1, size)
        # Two gradients and two weights, each of at most 4 bytes per element.
        self._memory = PinnedMemory(4 * 4 * self.size, device, "staging memory of the optimizer")
        gradients_and_weights = self._memory.bytes.view(torch.float32)[: 4 * self.size].split(self.size)
        self._gradients, self._weights = gradients_and_weights[:2], gradients_and_weights[2:]

    def fetch(self, pieces: Sequence[_Piece], number: int) -> Callable[[], object]:
        """Begin to copy the device's tensors of a piece to the host, if this number exists. Returns a function that
        waits for the copies, and for the weights of the last piece but one, whose memory is used again."""
        for piece in pieces[number : number + 1]:
            gradient, weight = self._of(piece, number)
            gradient.copy_(piece.gradient, non_blocking=True)
            if piece.main is None:
                weight.copy_(piece.weight, non_blocking=True)
        return wait_for_submitted(self._device)

    def step(self, piece: _Piece, number: int) -> None:
        """Take the step of a piece on the host, and begin to copy its weight to the device."""
        gradient, weight = self._of(piece, number)
        main, (first, second), group = weight if piece.main is None else piece.main, piece.moments, piece.group
        adamw(
            [main],
            [gradient],
            [first],
            [second],
            [],
            [piece.steps.clone()],  # torch increments it, but a parameter of several pieces takes one step
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if piece.main is not None:
            weight.copy_(main)
        piece.weight.copy_(weight, non_blocking=True)

    def _of(self, piece: _Piece, number: int) -> tuple[Tensor, Tensor]:
        """Return pinned memory for gradient and weight of a piece, in the dtypes of gradient and weight."""
        count, slot = piece.gradient.numel(), number % 2
        weights = self._weights[slot].view(piece.weight.dtype)
        return self._gradients[slot][:count], weights[:count]


def _cut(tensor: Tensor, start: int, size: int) -> Tensor:
    """Return a range of the elements of a contiguous tensor."""
    return tensor.detach().view(-1)[start : start + size]


_PAIRS = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("shard_float16_groups", "shard_fp32_from_float16_groups"),
)
"""Attributes of Megatron-Core's optimizers, usual and distributed, with bfloat16 weights and their main weights, by
group. The optimizer of a float32 model has none of them."""


def _weights_of(part: Any) -> dict[Tensor, Tensor]:
    """Return the bfloat16 weight, or its shard of this data rank, of each main weight."""
    return {
        main: weight
        for models, mains in _PAIRS
        for of_model, of_main in zip(getattr(part, models, ()), getattr(part, mains, ()), strict=True)
        for weight, main in zip(of_model, of_main, strict=True)
    }
