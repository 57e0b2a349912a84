"""The written file has the data of the tensor, and the tensor does not change."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from ppoctl.models.convert.hugging_face import Spec
from ppoctl.models.convert.safetensors_writer import SHARD_BYTES, SafetensorsWriter


def test_written_tensor_can_be_offloaded_afterwards(tmp_path: Path) -> None:
    """Offloaded roles free the storage of their weights, from which the best actor is written."""
    weights = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.arange(6).bfloat16().reshape(2, 3).t(),
        "c": torch.empty(0),
    }
    specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    writer = SafetensorsWriter(tmp_path, specs, SHARD_BYTES)
    for name, tensor in weights.items():
        writer.write(name, tensor)
    writer.finish()
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    for tensor in weights.values():
        tensor.untyped_storage().resize_(0)
