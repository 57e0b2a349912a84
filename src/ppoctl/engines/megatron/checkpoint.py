"""Whole training states (weights, main weights, moments, step counts) through Megatron-Core's dist_checkpointing.

The format is Megatron's torch_dist, so a state can be read under another parallel layout. What differs from its
default: the files are written by this process (the default writer starts a helper process and forks, which neither a
process with a vLLM engine nor an interactive one tolerates), everything is flushed before `save` returns, and `load`
refuses a state with anything missing, left over or of another shape.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_checkpoint

from ppoctl.engines.megatron.optimizer import own_step_counts
from ppoctl.errors import StorageError

Stages = Sequence[DistributedDataParallel]

_ALWAYS_THERE = ("metadata.json", "common.pt", ".metadata")
_UNREADABLE = (OSError, CheckpointingException, KeyError, ValueError, RuntimeError, EOFError, UnpicklingError)


def save_state(stages: Stages, optimizer: MegatronOptimizer, groups: ProcessGroupCollection, folder: Path) -> None:
    """Write the state into the existing empty `folder`; its files are flushed when this returns.
    Raises StorageError."""
    try:
        with _without_torch_deprecations():
            state = _sharded_state(stages, optimizer, groups, is_loading=False)
            dist_checkpointing.save(state, str(folder), sharded_strategy=_WriteInThisProcess("torch_dist", 1))
    except (OSError, CheckpointingException, CheckpointException) as error:
        raise StorageError(f"state cannot be written to `{folder}`: {error}") from error


def load_state(stages: Stages, optimizer: MegatronOptimizer, groups: ProcessGroupCollection, folder: Path) -> None:
    """Make `model` and `optimizer` what they were when `folder` was saved, bit for bit.

    Raises StorageError when a part is missing, does not fit, or cannot be read; the model is then undefined.
    """
    for name in _ALWAYS_THERE:
        if not (folder / name).is_file():
            raise StorageError(f"no whole saved state in `{folder}`: `{name}` is missing")
    try:
        with _without_torch_deprecations():
            template = _sharded_state(stages, optimizer, groups, is_loading=True)
            _require_same(dist_checkpointing.load_common_state_dict(str(folder)).get("of"), template["of"], folder)
            loaded = dist_checkpointing.load(template, str(folder), strict=StrictHandling.RAISE_ALL)
        _restore_untouched_steps(loaded["optimizer"])
        for key, stage in _by_key(stages):
            stage.module.load_state_dict(loaded[key])
        optimizer.load_state_dict(loaded["optimizer"])
        own_step_counts(optimizer)
    except CheckpointException as error:
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        raise StorageError(f"saved state in `{folder}` cannot be read: {causes}") from error
    except _UNREADABLE as error:
        raise StorageError(f"saved state in `{folder}` cannot be read: {error}") from error


def _sharded_state(
    stages: Stages, optimizer: MegatronOptimizer, groups: ProcessGroupCollection, *, is_loading: bool
) -> dict[str, Any]:
    metadata = {"dp_cp_group": groups.dp_cp, "distrib_optim_sharding_type": "fully_reshardable"}
    weights = {key: stage.module.sharded_state_dict(metadata=metadata) for key, stage in _by_key(stages)}
    of_optimizer = weights["model"] if len(stages) == 1 else weights
    model = {
        **asdict(stages[0].module.settings.shape),
        "distributed_optimizer": stages[0].ddp_config.use_distributed_optimizer,
    }
    state = {
        **weights,
        "of": model,
        "optimizer": optimizer.sharded_state_dict(of_optimizer, is_loading, metadata=metadata),
    }
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            # Megatron tolerates another vocabulary padding; here a different shape is a different model.
            value.allow_shape_mismatch = False
    return state


def _require_same(saved: Any, wanted: dict[str, Any], folder: Path) -> None:
    """Tensors do not tell all of it: two vocabularies may be padded to the same size."""
    differing = [name for name, value in wanted.items() if saved is None or saved.get(name) != value]
    if not differing:
        return
    if differing == ["distributed_optimizer"]:
        raise StorageError(
            f"saved state in `{folder}` cannot be read: its optimizer is laid out for `distributed_optimizer = "
            f"{str(saved['distributed_optimizer']).lower()}`",
            hint="keep `distributed_optimizer` as it was; any other part of the layout may change",
        )
    raise StorageError(f"saved state in `{folder}` cannot be read: of another model ({', '.join(differing)} differ)")


def _by_key(stages: Stages) -> list[tuple[str, DistributedDataParallel]]:
    """Megatron-Core's names for one and for several pipeline stages."""
    return [("model" if len(stages) == 1 else f"model{number}", stage) for number, stage in enumerate(stages)]


@contextmanager
def _without_torch_deprecations() -> Iterator[None]:
    """Megatron-Core 0.16 calls what torch 2.13 is about to replace; nothing a user can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield


def _restore_untouched_steps(saved: dict[Any, Any]) -> None:
    """A state saved before the first optimizer step has a step count of 0, which the format leaves out."""
    for part in saved.values() if 0 in saved else (saved,):  # experts have an optimizer of their own, the second
        inner = part.get("optimizer", part)  # nested beside the main weights in bfloat16
        if "state" in inner:  # a distributed optimizer keeps its count elsewhere
            inner["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))


class _WriteInThisProcess(TorchDistSaveShardedStrategy):
    """torch's own distributed-checkpoint writer instead of Megatron's background one; the same files."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        translated, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_torch_checkpoint(
            mcore_to_pyt_state_dict(translated, is_loading=False),
            storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
