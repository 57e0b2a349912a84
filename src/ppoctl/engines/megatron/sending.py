"""Weights from this rank to engines over a link of its own."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ppoctl.batch.bucket import TensorSpec, in_buckets
from ppoctl.batch.checksum import Print, fingerprint
from ppoctl.engines.link import Sending
from ppoctl.engines.megatron.model import PackedModel
from ppoctl.engines.megatron.weights import sent_parts
from ppoctl.ports import Departed, Link


def plan(stages: Sequence[PackedModel], max_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """How `in_buckets` will cut the weights of these pipeline stages."""
    parts = [part for stage in stages for part in sent_parts(stage)]
    without_numbers = [(part.name, torch.empty(part.shape, dtype=part.view.dtype, device="meta")) for part in parts]
    return [
        tuple(TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket)
        for bucket in in_buckets(without_numbers, max_bytes)
    ]


def broadcast(buckets: Iterable[Sequence[tuple[str, Tensor]]], link: Link, device: torch.device) -> Departed:
    """Send them over a link; one is on its way while the next is gathered. A link that breaks does not end the
    gathering, in which other ranks take part."""
    sending = Sending(link, device)
    prints: dict[str, Print] = {}
    for tensors in buckets:
        prints |= {name: fingerprint(tensor) for name, tensor in tensors}
        sending.send(tensors)
    return Departed(prints, arrived=sending.finish())
