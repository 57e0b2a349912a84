"""Complete training states (weights, main weights, moments, step counts) in the format of Megatron-Core's
dist_checkpointing.

The format is Megatron's torch_dist, so a state can be loaded with another parallel layout. Differences from
Megatron's default: this process writes the files (see `state_writer`), and flushes all data before a save is
finished. `load` rejects a state with missing or extra tensors, or tensors of another shape.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.frozen_parameters import trained_names
from ppoctl.engines.megatron.optimizer import blank_padding, own_step_counts, restore_empty_fields, sharded_state
from ppoctl.engines.megatron.pinned_memory import PinnedStaging
from ppoctl.engines.megatron.safe_loader import CommonDataOnly, DataOnly, causes
from ppoctl.engines.megatron.state_writer import COMMON_FILES, RankSaving, StateWriter
from ppoctl.models.convert.safe_pickle import why
from ppoctl.models.convert.torch_dist import read_metadata
from ppoctl.models.trainable import Trainable, trainable_from
from ppoctl.recipe.parallel import what_differs

_ALWAYS_THERE = (*COMMON_FILES, ".metadata")
_UNREADABLE = (OSError, CheckpointingException, KeyError, ValueError, RuntimeError, EOFError, UnpicklingError)


@dataclass(frozen=True)
class TrainerState:
    """The objects that a state consists of."""

    stages: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    groups: ProcessGroupCollection
    parallel: ParallelTable

    @property
    def trainable(self) -> Trainable:
        """Parameters that train: the state contains them and no others."""
        of_model: Trainable = self.stages[0].module.settings.model.trainable
        return of_model


def begin_save(trained: TrainerState, folder: Path, *, reshardable: str, in_background: bool) -> RankSaving:
    """Begin to write the state into the existing empty `folder`; `finish_save` completes the save. With
    `in_background`, returns as soon as the state is copied. Collective. Raises StorageError."""
    with _named_save_errors(folder), _without_torch_deprecations():
        state = _sharded_state(trained, reshardable, is_loading=False)
        writer = StateWriter(_copier(trained, state, reshardable) if in_background else None)
        # Always asynchronous: Megatron-Core then returns the request, and `RankSaving` decides when it runs.
        request = dist_checkpointing.save(state, str(folder), sharded_strategy=writer, async_sharded_save=True)
        return RankSaving(request, writer.files, in_background=in_background)


def finish_save(saving: RankSaving, folder: Path) -> dict[str, FileDigest]:
    """Wait until all ranks have written their files, and return the files of this rank. Collective. Raises
    StorageError."""
    with _named_save_errors(folder):
        return saving.finish(folder)


def load_state(trained: TrainerState, folder: Path) -> None:
    """Restore model and optimizer to the state saved in `folder`, bit for bit.

    Raises StorageError if a part of the state is missing, does not fit, or cannot be read. The weights of the model
    are then undefined.
    """
    for name in _ALWAYS_THERE:
        if not (folder / name).is_file():
            raise StorageError(f"no complete saved state in `{folder}`: `{name}` is missing")
    optimizer, loader = trained.optimizer, DataOnly(read_metadata(folder))
    try:
        with _without_torch_deprecations():
            saved = CommonDataOnly().load_common(folder)
            _require_same(saved.get("of"), trained, folder)
            _require_layout(saved["layout"], trained, folder)
            _require_same_trained(saved.get("trains"), trained, folder)
            template = _sharded_state(trained, saved["layout"]["reshardable"], is_loading=True)
            loaded = dist_checkpointing.load(
                template, str(folder), loader, CommonDataOnly(), strict=StrictHandling.RAISE_ALL
            )
        restore_empty_fields(loaded["optimizer"])
        for key, stage in _by_key(trained.stages):
            stage.module.load_state_dict(loaded.get(key, {}), strict=trained.trainable.is_all)
        optimizer.load_state_dict(loaded["optimizer"])
        own_step_counts(optimizer)
    except CheckpointException as error:
        raise _unreadable(folder, causes(error)) from error
    except _UNREADABLE as error:
        raise _unreadable(folder, why(error)) from error


def _unreadable(folder: Path, reason: str) -> StorageError:
    return StorageError(f"saved state in `{folder}` cannot be read: {reason}", hint=f"ls -la {quoted(folder)}")


def _sharded_state(trained: TrainerState, reshardable: str, *, is_loading: bool) -> dict[str, Any]:
    kind = {"full": "fully_reshardable", "dp": "dp_reshardable"}[reshardable]
    metadata = {
        "dp_cp_group": trained.groups.dp_cp,
        "distrib_optim_sharding_type": kind,
        # The first data rank gathers the optimizer over gloo and writes it. By default, Megatron-Core gathers on
        # every rank and, with NCCL, a whole buffer at a time in the memory of each GPU.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        # The usual format stores equal layers as slices of one tensor, which must be complete.
        **({} if trained.trainable.is_all else {"non_homogeneous_layers": True}),
    }
    weights = {key: stage.module.sharded_state_dict(metadata=metadata) for key, stage in _by_key(trained.stages)}
    optimizer_weights = weights["model"] if len(weights) == 1 else weights
    moments = sharded_state(trained.optimizer, optimizer_weights, is_loading=is_loading, metadata=metadata)
    layout = {**trained.parallel.model_dump(), "reshardable": reshardable}
    state = {**_only_trained(weights, trained), "of": _model_of(trained), "layout": layout, "optimizer": moments}
    if not trained.trainable.is_all:
        state["trains"] = asdict(trained.trainable)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            # Megatron accepts a different vocabulary padding. Here a different shape means a different model.
            value.allow_shape_mismatch = False
    if not is_loading:
        blank_padding(moments)
    return state


def _only_trained(weights: dict[str, Any], trained: TrainerState) -> dict[str, Any]:
    """Return the weights of each stage without the frozen parameters and the tensors that never train."""
    if trained.trainable.is_all:
        return weights
    names = {key: trained_names(stage.module) for key, stage in _by_key(trained.stages)}
    return {key: {name: weight for name, weight in of.items() if name in names[key]} for key, of in weights.items()}


def _copier(trained: TrainerState, state: dict[str, Any], reshardable: str) -> Callable[[Tensor], Tensor]:
    """Return a function that copies a tensor if training will change it while files are written. Tensors that were
    gathered for this save belong to no other object and are not copied again."""
    is_gathered = trained.parallel.distributed_optimizer and reshardable == "full"
    parts = nested_values(state["optimizer"]) if is_gathered else ()
    gathered = {_address(part.data) for part in parts if isinstance(part, ShardedTensor | ShardedTensorFactory)}
    device = next(trained.stages[0].parameters()).device
    staging = PinnedStaging(device) if device.type == "cuda" else None

    def copied(tensor: Tensor) -> Tensor:
        if _address(tensor) in gathered:
            return tensor
        return staging.copied(tensor) if staging and tensor.is_cuda else tensor.detach().to("cpu", copy=True)

    return copied


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _model_of(trained: TrainerState) -> dict[str, Any]:
    """Return the shape of the model. The tensors do not determine it: two vocabularies may have the same padded
    size."""
    return asdict(trained.stages[0].module.settings.shape)


def _require_same(saved: Any, trained: TrainerState, folder: Path) -> None:
    """Raise StorageError if the state belongs to another model. A field that an older state lacks has its default
    value."""
    defaults = {field.name: field.default for field in fields(trained.stages[0].module.settings.shape)}
    saved_shape = {**defaults, **(saved or {})}
    differing = [name for name, value in _model_of(trained).items() if saved_shape[name] != value]
    if differing:
        raise StorageError(
            f"saved state in `{folder}` cannot be read: it belongs to another model ({', '.join(differing)} differ)"
        )


def _require_layout(saved: dict[str, Any], trained: TrainerState, folder: Path) -> None:
    keys = what_differs(saved, trained.parallel.model_dump())
    if not keys:
        return
    saved_with = ", ".join(f"`{key} = {str(saved[key]).lower()}`" for key in keys)
    hint = "load it with that layout; with `checkpoint.reshardable = full` a state can be loaded with any layout"
    if "distributed_optimizer" in keys:
        hint = "keep `distributed_optimizer` as it was; a state cannot be loaded by the other kind of optimizer"
    raise StorageError(f"saved state in `{folder}` cannot be read: it was saved with {saved_with}", hint=hint)


def _require_same_trained(saved: dict[str, Any] | None, trained: TrainerState, folder: Path) -> None:
    """Raise StorageError if other parameters trained when the state was saved. Frozen parameters are not saved."""
    of_state = trainable_from(saved or {})
    if of_state != trained.trainable:
        raise StorageError(
            f"saved state in `{folder}` cannot be read: it was saved with {_what_trains(of_state)}, but the role now "
            f"has {_what_trains(trained.trainable)}",
            hint="set `train` and `freeze` of the role as they were, or start a new run with another `name`",
        )


def _what_trains(trainable: Trainable) -> str:
    train = "all" if trainable.top_layers is None else f"{{top_layers = {trainable.top_layers}}}"
    if (lora := trainable.lora) is not None:
        targets = '"all-linear"' if lora.targets is None else list(lora.targets)
        train = f"{{lora = {{rank = {lora.rank}, alpha = {lora.alpha:g}, targets = {targets}}}}}"
    return f"`train = {train}` and `freeze = {list(trainable.freeze)}`"


@contextmanager
def _named_save_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:
        raise StorageError(f"state cannot be written to `{folder}`: {causes(error)}") from error
    except (OSError, CheckpointingException) as error:
        raise StorageError(f"state cannot be written to `{folder}`: {error}") from error


def _by_key(stages: Sequence[DistributedDataParallel]) -> list[tuple[str, DistributedDataParallel]]:
    """Return the stages by Megatron-Core's keys, which differ between a single stage and several."""
    return [("model" if len(stages) == 1 else f"model{number}", stage) for number, stage in enumerate(stages)]


@contextmanager
def _without_torch_deprecations() -> Iterator[None]:
    """Context without the deprecation warnings of torch 2.13 about Megatron-Core 0.16. Users cannot act on these
    warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield
