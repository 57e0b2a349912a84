"""Weights of a Megatron folder, under Hugging Face names. If the folder is a saved state of a partly trained role,
the model that the role started from completes it.

    state: what trained                                    -->  MegatronWeights: all tensors
    frozen.json: model, digest of the frozen weights  -->  base: all others, in the dtype of the state
                 rank, alpha, targets of adapters     -->  adapters of the state, merged into weights of the base
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.accounted_tensors import Accounted
from ppoctl.models.convert.checksum import TensorChecksum, checksum_of
from ppoctl.models.convert.frozen_base import FrozenBase, complete_command, completing_folder, read_frozen_base
from ppoctl.models.convert.frozen_digest import frozen_digest
from ppoctl.models.convert.hugging_face import Weights, open_weights
from ppoctl.models.convert.parameters import MegatronWeights
from ppoctl.models.convert.stored_adapters import StoredAdapters
from ppoctl.models.convert.torch_dist import TorchDist, is_torch_dist
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape

ChecksumsOf = Callable[[Callable[[str], Tensor], Sequence[str]], Mapping[str, TensorChecksum]]
"""Function that returns the checksums of the tensors with these names, which the first argument reads."""


def checksums_of(read: Callable[[str], Tensor], names: Sequence[str]) -> dict[str, TensorChecksum]:
    """Return the checksums of the tensors with these names."""
    return {name: checksum_of(read(name)) for name in names}


def open_megatron(
    folder: Path, shape: ModelShape, head: Head, *, like: Path | None = None, checksums: ChecksumsOf = checksums_of
) -> MegatronWeights:
    """Open all weights of a Megatron folder. `like`: folder of the model that completes the folder, if it is not
    at the path in `frozen.json`.

    Raises EnvironmentProblemError if the completing model is missing or has other weights than at the save, and the
    errors of `TorchDist`, `StoredAdapters`, `MegatronWeights` and `Accounted`.
    """
    state, frozen = TorchDist(folder), read_frozen_base(folder)
    if frozen is None:
        return MegatronWeights(state, shape, head)
    base = completing_folder(folder, frozen, like)
    adapters = None if frozen.adapters is None else StoredAdapters(state, shape, frozen.adapters)
    weights = MegatronWeights(state, shape, head, _weights_of(base, shape, head), adapters)
    if frozen_digest(checksums(weights.frozen_tensor, weights.completed)) != frozen.digest:
        raise _other_base(folder, frozen, base)
    return weights


def _weights_of(base: Path, shape: ModelShape, head: Head) -> Weights:
    if is_torch_dist(base):
        return open_megatron(base, shape, head)
    return Accounted(open_weights(base, allow_pickle=False), base, shape, head)


def _other_base(folder: Path, frozen: FrozenBase, base: Path) -> EnvironmentProblemError:
    return EnvironmentProblemError(
        f"`{folder}` has only the weights that trained. The others are those of `{frozen.model}`, but the weights in "
        f"`{base}` have changed since then",
        hint=f"put the model back as it was, or name a folder that has it: {complete_command(folder)}",
    )
