"""The engines' side of a transfer: the methods of each engine process that `sync` calls. Engines load one bucket at a
time.

    holds_weights()                      -> bool             whether a transfer may omit what has not changed
    begin_weights()                                          prepare to load
    take_weights(Bucket)                                     load tensors from any location, or
    receive_weights(BroadcastGroup, first_rank, plan)        load tensors as they arrive in a broadcast
    end_weights()                        -> [LoadedWeight]   all weights are loaded: read them back

    restart(folder)                      -> [LoadedWeight]   if weights cannot change in place

All tensor ranks of an engine receive the same calls and return the same results.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ppoctl.core.machine.device import this_device
from ppoctl.engines.weights.broadcast import BroadcastGroup, is_linked, received
from ppoctl.engines.weights.bucket import Bucket, NamedTensors, TensorSpec
from ppoctl.models.convert.checksum import LoadedWeight


class ReceivingEngine(ABC):
    """One process of an engine, which is one tensor rank of the engine."""

    @abstractmethod
    def takes_weights(self) -> bool:
        """Whether new weights can be loaded in place."""

    @abstractmethod
    def holds_weights(self) -> bool:
        """Whether the engine has loaded all weights of a transfer, and has not discarded them since."""

    @abstractmethod
    def begin_weights(self) -> None:
        """Prepare to load weights. Weights that are not loaded remain as they are. Raises WeightSyncError while
        requests are running."""

    @abstractmethod
    def load(self, tensors: NamedTensors) -> None:
        """Load some of the weights. After the return, the caller may overwrite the memory of `tensors`."""

    @abstractmethod
    def end_weights(self) -> list[LoadedWeight]:
        """Activate the loaded weights, and drop caches that were computed with the old weights. Returns all weights,
        read back from the memory with which the engine computes."""

    @abstractmethod
    def restart(self, folder: str) -> list[LoadedWeight]:
        """Restart from this Hugging Face folder. Returns all tensors that were read."""

    @abstractmethod
    def tensor_rank(self) -> int:
        """Return the tensor rank of this process in its engine."""

    def take_weights(self, bucket: Bucket) -> None:
        """Load the tensors of a bucket. Raises SenderLostError, EnvironmentProblemError or OutOfMemoryError."""
        self.load(bucket.tensors())

    def is_linked(self, group: BroadcastGroup) -> bool:
        """Whether this process is still in this process group of an earlier broadcast."""
        return is_linked(group)

    def receive_weights(self, group: BroadcastGroup, first_rank: int, plan: Sequence[Sequence[TensorSpec]]) -> None:
        """Load buckets as they arrive in a process group. `first_rank` is the rank of the engine's first process in
        the group. Raises ProcessLostError if the group breaks."""
        for tensors in received(group, first_rank + self.tensor_rank(), plan, this_device()):
            self.load(tensors)
