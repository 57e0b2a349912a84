"""New weights into a running engine, and proof of what the engine then holds.

Loading is vLLM's layerwise reload, in place (`transfer`). The proof does not trust it. After every load the worker
reads each weight *back from where the engine computes with it* and checksums that; the sending side checksums each
tensor as it leaves the trainer; `compare` wants the two lists equal, name by name. What is read back, and so proven:

- Linear layers and the output head on a CPU: the engine computes with a packed copy in oneDNN's own layout and keeps
  no plain weight. The worker multiplies the identity matrix by the packed copy through the layer's own kernel. Each
  output element is one weight times 1 plus zeros, so this returns the packed weights exactly, in float32 and in
  bfloat16. A tied head has a packed copy of its own beside the embedding, and is read and compared by itself.
- Everything else (embeddings, norms, biases; on a GPU all weights): the resident tensor itself.
- Nothing missing, nothing extra: every parameter of the engine must be covered by a tensor the trainer sent, and
  every tensor the trainer announced must have left it once and have its place in the engine.

Numbers are compared bit by bit, except that -0.0 and denormals count as 0: adding zeros in the identity product
loses the sign of a zero, and kernels may flush denormals. Not proven here: that the engine's attention, norms and
sampling compute what the trainer's do (that is the canary's part, within its tolerance), and that no keys and values
of older weights are read (that cannot happen by construction: see `Engine._queue`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppoctl.batch.checksum import Print, fingerprint
from ppoctl.errors import WeightSyncError

_PROBE_ROWS = 512
"""Rows of the identity per product: bounds the memory of reading back a large matrix."""


@dataclass(frozen=True)
class Held:
    """One weight as the engine holds it, under its Hugging Face name."""

    name: str
    print: Print
    shares: str | None
    """The weight this one is tied to: what the trainer must have sent where it did not send `name` itself."""


class Sent(dict[str, Print]):
    """What has left the trainer in one transfer."""

    def add(self, prints: Mapping[str, Print]) -> None:
        for name, print_ in prints.items():
            if name in self:
                raise _gap(name, "left the trainer twice")
            self[name] = print_


def compare(names: Sequence[str], sent: Sent, held: Sequence[Held]) -> None:
    """Raise WeightSyncError, naming the tensor, unless the engine holds exactly what the trainer announced."""
    announced = set(names)
    places = {place.name for place in held}
    for name in names:
        if name not in sent:
            raise _gap(name, f"was announced and never left the trainer ({len(sent)} of {len(names)} did)")
        if name not in places:
            raise _gap(name, "was sent and has no place in the engine")
    for name in sent:
        if name not in announced:
            raise _gap(name, "was sent and is not among the announced names")
    for place in held:
        _compare_one(place, sent)


def _compare_one(place: Held, sent: Mapping[str, Print]) -> None:
    source = place.name if place.name in sent else place.shares
    if source is None or source not in sent:
        raise _gap(place.name, f"is held by the engine ({place.print}) and was not sent")
    if place.print != sent[source]:
        via = "" if source == place.name else f" with `{source}`, to which it is tied,"
        raise _gap(place.name, f"was sent{via} as {sent[source]}, and the engine holds {place.print}")


def _gap(name: str, what: str) -> WeightSyncError:
    return WeightSyncError(
        f"weight `{name}` {what}",
        hint="the generator would sample from other weights than the trainer's: resume the run, which loads them "
        "anew; if it fails again, report it with the model's config.json",
    )


class WeightReceiver:
    """Mixed into vLLM's worker (`worker_extension_cls`): runs where the engine's weights are."""

    model_runner: Any

    def ppoctl_held(self) -> list[Held]:
        """What the engine holds after new weights, read back from where it computes."""
        model = self.model_runner.get_model()
        with torch.no_grad():
            repack_heads(model)
            return list(_held(model))


def repack_heads(model: torch.nn.Module) -> None:
    """Rebuild the packed copy of every layer that has one beside a resident weight.

    Loading rebuilds those of layers that received weights. A head tied to the embedding receives none, so
    without this its logits come from the old embedding, silently (vLLM 0.32 and 0.33, CPU). No-op on a GPU.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
            layer: Any = module
            layer.quant_method.process_weights_after_loading(layer)


def _held(model: torch.nn.Module) -> Iterator[Held]:
    """Every parameter of the engine's model under Hugging Face names; fused layers are split into their parts."""
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    owners: dict[int, str] = {}
    dtype = next(model.parameters()).dtype
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            parts = fused.get(path.rpartition(".")[2], ())
            # Families whose checkpoints are fused too list themselves as their only part.
            parts = parts if len(parts) > 1 else ()
            sizes = module.output_partition_sizes if parts else ()
            value = _in_use(module, kind, parameter, dtype)
            for name, part in _parts(f"{path}.{kind}", value, parts, sizes):
                yield Held(name, fingerprint(_whole(module, kind, part)), owners.get(id(parameter)))
            owners.setdefault(id(parameter), f"{path}.{kind}")


def _parts(name: str, value: Tensor, parts: Sequence[str], sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    if not parts:
        yield name, value
        return
    path, _, kind = name.rpartition(".")
    parent, _, _ = path.rpartition(".")
    for part, rows in zip(parts, value.split(list(sizes)), strict=True):
        yield f"{parent}.{part}.{kind}", rows


def _in_use(module: Any, kind: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers this tensor rank computes with."""
    value = parameter.data
    if kind == "weight" and hasattr(module, "cpu_linear"):
        value = _unpacked(module, dtype)
    elif value.dtype != dtype and hasattr(module, "cpu_linear"):
        # Some CPU kernels keep the bias in float32: exact, and exact back.
        value = value.to(dtype)
    return value


def _whole(module: Any, kind: str, part: Tensor) -> Tensor:
    """The tensor put together from all tensor ranks, padding removed."""
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    ranks = get_tp_group()
    if ranks.world_size > 1:
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            part = ranks.all_gather(part.contiguous(), 0)
        elif isinstance(module, RowParallelLinear) and kind == "weight":
            part = ranks.all_gather(part.contiguous(), 1)
    # The vocabulary is padded to a multiple of 64; the padding is never sampled.
    return part[: module.org_vocab_size] if hasattr(module, "org_vocab_size") else part


def _unpacked(module: Any, dtype: torch.dtype) -> Tensor:
    """The packed weight [out, in] of a CPU linear layer, read through the layer's own kernel."""
    width = module.embedding_dim if hasattr(module, "embedding_dim") else module.input_size_per_partition
    columns = []
    for start in range(0, width, _PROBE_ROWS):
        rows = min(_PROBE_ROWS, width - start)
        probe = torch.zeros(rows, width, dtype=dtype)
        probe[torch.arange(rows), torch.arange(start, start + rows)] = 1
        columns.append(module.cpu_linear(probe, module.weight, None))
    return torch.cat(columns).t()
