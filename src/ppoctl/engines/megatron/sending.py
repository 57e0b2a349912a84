"""Which ranks send weights to engines, and how a rank sends them over a link of its own."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppoctl.batch.bucket import Bucket, TensorSpec, in_buckets, specs_of
from ppoctl.batch.checksum import Print, fingerprint
from ppoctl.engines.link import Sending
from ppoctl.engines.megatron.model import PackedModel
from ppoctl.engines.megatron.weights import sent_parts
from ppoctl.errors import WeightSyncError
from ppoctl.ports import Departed, Link


@dataclass(frozen=True)
class Senders:
    """Ranks that have whole tensors once they are gathered, and who is to read them there."""

    sharing: frozenset[int] = frozenset()
    """In memory that processes of their nodes read (`engines.sharing`)."""
    storing: frozenset[int] = frozenset()
    """Where any process finds them, for a copy more on each side."""

    def has(self, rank: int) -> bool:
        return rank in self.sharing or rank in self.storing

    @classmethod
    def near(cls, groups: Sequence[Sequence[int]], nodes: Sequence[str], wanted: Collection[str]) -> "Senders":
        """One for each node that wants them, of these groups, whose first ranks have whole tensors; what is left gets
        them from a store. `nodes` has that of every rank."""
        first_there: dict[str, int] = {}
        for group in groups:
            first_there.setdefault(nodes[group[0]], group[0])
        sharing = {first_there[node] for node in wanted if node in first_there}
        everyone = bool(wanted) and set(wanted) <= set(first_there)
        return cls(frozenset(sharing), frozenset() if everyone else frozenset({min(sharing, default=groups[0][0])}))


def in_all_places(found: Sequence[Bucket]) -> Bucket:
    """A bucket that several ranks have made. Raises WeightSyncError where they hold different weights."""
    first, *others = found
    for name, print_ in first.prints.items():
        for other in others:
            if other.prints.get(name) != print_:
                raise WeightSyncError(
                    f"data ranks of the actor hold different weights: `{name}` is {print_} on one of them, and "
                    f"{other.prints.get(name)} on another",
                    hint="`ppoctl resume RUN` loads one state into all; if they part again, report it with the "
                    "layout",
                )
    return Bucket(first.prints, tuple(content for bucket in found for content in bucket.contents))


def plan(stages: Sequence[PackedModel], max_bytes: int) -> list[tuple[TensorSpec, ...]]:
    """How `in_buckets` will cut the weights of these pipeline stages."""
    parts = [part for stage in stages for part in sent_parts(stage)]
    without_numbers = [(part.name, torch.empty(part.shape, dtype=part.view.dtype, device="meta")) for part in parts]
    return [specs_of(bucket) for bucket in in_buckets(without_numbers, max_bytes)]


def broadcast(buckets: Iterable[Sequence[tuple[str, Tensor]]], link: Link, device: torch.device) -> Departed:
    """Send them over a link; one is on its way while the next is gathered. A link that breaks does not end the
    gathering, in which other ranks take part."""
    sending = Sending(link, device)
    prints: dict[str, Print] = {}
    for tensors in buckets:
        prints |= {name: fingerprint(tensor) for name, tensor in tensors}
        sending.send(tensors)
    return Departed(prints, arrived=sending.finish())
