"""An engine in plain torch: it keeps the received weights on the device, and returns their checksums."""

import torch
from torch import Tensor

from ppoctl.core.machine.device import this_device
from ppoctl.engines.weights.bucket import Bucket, NamedTensors
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.engines.weights.receiving import ReceivingEngine
from ppoctl.engines.weights.sharing import Shared
from ppoctl.models.convert.checksum import LoadedWeight, checksum_of


class Receiver(ReceivingEngine):
    """The object in the child process."""

    def __init__(self) -> None:
        self._device = this_device()
        self._held: dict[str, Tensor] = {}
        self._read: set[str] = set()
        self._forgotten = 0

    def takes_weights(self) -> bool:
        return True

    def holds_weights(self) -> bool:
        return bool(self._held)

    def begin_weights(self) -> None:
        self._read = set()

    def take_weights(self, bucket: Bucket) -> None:
        near = next(content for content in bucket.contents if isinstance(content, Shared) and content.is_near())
        self._read.add(type(near.handle).__name__)
        super().take_weights(bucket)

    def load(self, tensors: NamedTensors) -> None:
        # In place if the weight exists already, as in an engine.
        for name, tensor in tensors:
            if name not in self._held:
                self._held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._held[name].copy_(tensor)

    def end_weights(self) -> list[LoadedWeight]:
        return [LoadedWeight(name, checksum_of(tensor), None) for name, tensor in self._held.items()]

    def restart(self, folder: str) -> list[LoadedWeight]:
        raise NotImplementedError("weights are changed in place")

    def tensor_rank(self) -> int:
        return 0

    def sleep(self) -> None:
        """Free the memory of all weights."""
        self._forgotten = self.size()
        self._held = {}
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def vocab_size(self) -> int:
        return 64

    def score(self, tokens: tuple[int, ...], draws: int) -> CanaryScores:
        """Return canary log-probs without a computation: all are 0, as from the part's trainer."""
        return CanaryScores((0.0,) * (len(tokens) - 1), (0,) * draws, (0.0,) * draws)

    def read(self) -> list[str]:
        """Return the kinds of memory that the last transfer was read from."""
        return sorted(self._read)

    def size(self) -> int:
        """Return the bytes of all weights."""
        return sum(tensor.nbytes for tensor in self._held.values())

    def forgotten(self) -> int:
        """Return the bytes that the last sleep freed."""
        return self._forgotten

    def values(self) -> dict[str, int]:
        """Return the checksum of each weight."""
        return {name: checksum_of(tensor).value for name, tensor in self._held.items()}
