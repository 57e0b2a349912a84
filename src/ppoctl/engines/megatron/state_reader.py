"""Loading of the weights of a torch_dist checkpoint into a model with any layout. Optimizers and other data are not
read.

Megatron-Core's loader copies tensors directly into the parameters. Objects that are not tensors (`common.pt`) are not
read.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ppoctl.core.errors import StorageError, quoted
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.parameter_shards import parts_of
from ppoctl.engines.megatron.safe_loader import DataOnly, causes
from ppoctl.models.convert.checksum import TensorChecksum
from ppoctl.models.convert.megatron_folder import checksums_of, open_megatron
from ppoctl.models.convert.parameters import MegatronWeights, layers_alike
from ppoctl.models.convert.safe_pickle import why
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.lora import is_adapter
from ppoctl.models.shape import ModelShape


@torch.no_grad()
def load_torch_dist(
    stages: Sequence[PackedModel],
    folder: Path,
    is_read: Callable[[Tensor], bool] = lambda _: True,
    *,
    like: Path | None = None,
) -> None:
    """Load the weights of this rank's pipeline stages, cast to the model's dtype. Tensors of the stages for which
    `is_read` returns False keep their values. If the folder has only the weights that trained, the others are read
    from the model that completes it, which may be in the folder `like`. Adapters in the folder are merged into the
    weights. Collective over all ranks of the layout.

    Raises EnvironmentProblemError if a tensor is missing, unknown or of another shape; the error names the first such
    tensor. Raises it also if the completing model is missing or has changed. Raises StorageError if the folder cannot
    be read.
    """
    shape = stages[0].settings.shape
    found = open_megatron(folder, shape, stages[0].head, like=like, checksums=_checksums_of_all_ranks)
    if found.layers_alike != layers_alike(shape) and shape.experts is not None:
        raise StorageError(
            f"checkpoint in `{folder}` stores layers with experts as slices of one tensor, which no model can load",
            hint="convert it to Hugging Face first, with --no-parity",
        )
    parameters = _parameters(stages, found, shape)
    # Megatron-Core reads all slices of a tensor or none. If a stage reads only some, tensors are read one by one.
    is_whole = all(is_read(parameter.data) for parameter in parameters.values())
    tensors = parameters if is_whole else {}
    one_by_one = set(found.completed) if is_whole else set(found.specs)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
            warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
            DataOnly(found.state.metadata).load(tensors, folder)
    except CheckpointException as error:
        raise _unreadable(folder, causes(error)) from error
    except (OSError, CheckpointingException, KeyError, ValueError, RuntimeError, EOFError) as error:
        raise _unreadable(folder, why(error)) from error
    for stage in stages if one_by_one else ():
        for part in parts_of(stage):
            if part.name in one_by_one and part.is_here(stage.pg_collection) and is_read(part.view):
                part.write(found.tensor(part.name), stage.pg_collection)


def _checksums_of_all_ranks(read: Callable[[str], Tensor], names: Sequence[str]) -> dict[str, TensorChecksum]:
    """Return the checksums of the tensors with these names. Each rank reads some of the tensors. Collective."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[dict[str, TensorChecksum]] = [{}] * size
    torch.distributed.all_gather_object(found, checksums_of(read, names[rank::size]))
    return {name: checksum for of_rank in found for name, checksum in of_rank.items()}


def _unreadable(folder: Path, reason: str) -> StorageError:
    return StorageError(f"checkpoint in `{folder}` cannot be read: {reason}", hint=f"ls -la {quoted(folder)}")


def _parameters(stages: Sequence[PackedModel], found: MegatronWeights, shape: ModelShape) -> dict[str, ShardedTensor]:
    """Return this rank's slices of all parameters that the checkpoint has, under the keys of the checkpoint."""
    renamed = {
        parameter.key(shape, layers_alike=found.layers_alike).name: found.keys.get(parameter.name)
        for parameter in found.parameters
    }
    metadata = {"non_homogeneous_layers": not found.layers_alike}
    tensors: dict[str, ShardedTensor] = {}
    for stage in stages:
        state = stage.sharded_state_dict(metadata={**metadata, "dp_cp_group": stage.pg_collection.dp_cp})
        apply_factories(state)
        for value in nested_values(state):
            if isinstance(value, ShardedTensor) and not _is_own(value.key):
                assert value.data.is_contiguous(), f"`{value.key}` would be read into a copy"
                key = renamed[value.key]
                if key is not None:
                    value.key, value.allow_shape_mismatch = key.name, False
                    tensors[str(len(tensors))] = value
    return tensors


def _is_own(key: str) -> bool:
    """Return whether a parameter has initial values of its own: a value head on the policy's model, or an adapter."""
    return key.startswith(VALUE_HEAD_PREFIX) or is_adapter(key)
