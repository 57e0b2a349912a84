"""How weights reach a running engine: vLLM's weight-transfer interface, with tensors this process can read already.

    start_weight_update  ->  update_weights(bucket) ...  ->  finish_weight_update

Buckets come in any number and order; a fused layer is loaded when its last part has come. On one host the tensors of
a bucket are views of shared memory, or the trainer's own where it is in the same process.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "ppoctl_host"


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):
    """There is no connection to set up."""


@dataclass
class Arrived(WeightTransferUpdateInfo):
    """Some of the weights, under Hugging Face names."""

    tensors: list[tuple[str, Tensor]]


class HostTransfer(WeightTransferEngine[NothingToAgreeOn, Arrived]):
    """Loads what it is handed, in checkpoint format."""

    init_info_cls = NothingToAgreeOn
    update_info_cls = Arrived

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Arrived) -> None:
        model: Any = self.model
        model.load_weights(iter(update_info.tensors))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to do."""


def register() -> None:
    """Make the backend known to vLLM in this process; safe to call again."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HostTransfer)
