"""The engines' side: what each process of an engine answers to `sync`, one bucket at a time.

    begin_weights()                                          weights will come
    take_weights(Bucket)                                     load them, from wherever they lie, or
    receive_weights(BroadcastGroup, first_rank, plan)        load them as they arrive in a broadcast
    end_weights()                        -> [LoadedWeight]   all have come: what was read back

    restart(folder)                      -> [LoadedWeight]   where weights cannot change in place

All tensor ranks of an engine are called alike, and answer the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ppoctl.machine.device import this_device
from ppoctl.weights.broadcast import BroadcastGroup, is_linked, received
from ppoctl.weights.bucket import Bucket, NamedTensors, TensorSpec
from ppoctl.weights.checksum import LoadedWeight


class ReceivingEngine(ABC):
    """One process of an engine, which is a tensor rank of it."""

    @abstractmethod
    def takes_weights(self) -> bool:
        """Whether new weights can be loaded in place."""

    @abstractmethod
    def begin_weights(self) -> None:
        """Get ready to load. Raises WeightSyncError while requests are running."""

    @abstractmethod
    def load(self, tensors: NamedTensors) -> None:
        """Load some of the weights; their memory may change again when this has returned."""

    @abstractmethod
    def end_weights(self) -> list[LoadedWeight]:
        """Use what was loaded, and forget what was computed with the old weights: every weight, read back from where
        the engine computes with it."""

    @abstractmethod
    def restart(self, folder: str) -> list[LoadedWeight]:
        """Start anew on this Hugging Face folder: every tensor that was read."""

    @abstractmethod
    def tensor_rank(self) -> int:
        """Number of this process among those of its engine."""

    def take_weights(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket. Raises SenderLostError, EnvironmentProblemError, OutOfMemoryError."""
        self.load(bucket.tensors())

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether this process is in the process group of an earlier broadcast."""
        return is_linked(group)

    def receive_weights(self, group: BroadcastGroup, first_rank: int, plan: Sequence[Sequence[TensorSpec]]) -> None:
        """Load buckets as they arrive in a process group, in which `first_rank` is the first process of this engine.
        Raises ProcessLostError when the group breaks."""
        for tensors in received(group, first_rank + self.tensor_rank(), plan, this_device()):
            self.load(tensors)
