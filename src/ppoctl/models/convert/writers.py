"""Writers of the weights of a model in either format, one parameter at a time."""

from contextlib import closing
from pathlib import Path

import torch

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.hugging_face import Weights
from ppoctl.models.convert.parameters import assembled, layers_alike, parameters
from ppoctl.models.convert.safetensors_writer import SafetensorsWriter
from ppoctl.models.convert.torch_dist_writer import TorchDistWriter
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape


def write_hugging_face(weights: Weights, folder: Path, shard_bytes: int) -> None:
    """Write weights as sharded safetensors with an index. Raises OSError."""
    with closing(SafetensorsWriter(folder, weights.specs, shard_bytes)) as writer:
        for name in weights.specs:
            writer.write(name, weights.tensor(name))
        writer.finish()


def write_megatron(weights: Weights, shape: ModelShape, head: Head, folder: Path, shard_bytes: int) -> None:
    """Write weights as a torch_dist checkpoint for any layout. Raises OSError, and EnvironmentProblemError if tensors
    that Megatron stores as one tensor have different dtypes."""
    alike, dtypes = layers_alike(shape), dict[str, torch.dtype]()
    with closing(TorchDistWriter(folder, shard_bytes)) as writer:
        for parameter in parameters(shape, head):
            key = parameter.key(shape, layers_alike=alike)
            for part in parameter.parts:
                dtype = weights.specs[part.name].dtype
                if dtypes.setdefault(key.name, dtype) != dtype:
                    raise EnvironmentProblemError(
                        f"tensor `{part.name}` is {dtype}, others of Megatron's `{key.name}` are {dtypes[key.name]}",
                        hint="cast all of them: --dtype float32",
                    )
            writer.write(key.name, assembled(parameter, weights, shape), key.leading)
        writer.finish({"head": head})
