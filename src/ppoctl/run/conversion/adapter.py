"""`convert-ckpt --to peft`: the adapters of a saved state, as a folder that peft loads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ppoctl.core.errors import RecipeError, quoted
from ppoctl.models.convert import verify
from ppoctl.models.convert.adapters import adapters
from ppoctl.models.convert.frozen_base import completing_folder, read_frozen_base
from ppoctl.models.convert.hugging_face import DTYPES, Spec
from ppoctl.models.convert.megatron_folder import open_megatron
from ppoctl.models.convert.parameters import MegatronWeights
from ppoctl.models.convert.peft_config import write_peft_config
from ppoctl.models.convert.peft_folder import PREFIX, WEIGHTS, PeftFolder, peft_targets, require_fits
from ppoctl.models.convert.stored_adapters import StoredAdapters
from ppoctl.models.convert.tensors import VALUE_HEAD
from ppoctl.models.convert.torch_dist import is_torch_dist
from ppoctl.models.convert.verify import Check
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import Trainable
from ppoctl.run.conversion.found_checkpoint import FoundCheckpoint


@dataclass(frozen=True)
class StateAdapter:
    """The adapters of a state, and the value head of a critic, which trains whole; a `hugging_face.Weights`."""

    model: MegatronWeights
    """Weights of the state, with the adapters merged."""
    adapters: StoredAdapters
    shape: ModelShape
    head: Head
    trainable: Trainable
    base: str
    """Folder or hub id of the model that the adapters were trained on."""
    dtype: torch.dtype
    """Dtype of the tensors in the output."""

    @property
    def specs(self) -> dict[str, Spec]:
        """Shape and dtype of all tensors."""
        found = dict(self.adapters.specs)
        if self.head == "value":
            found[VALUE_HEAD] = self.model.specs[VALUE_HEAD]
        return {name: Spec(spec.shape, self.dtype) for name, spec in found.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor in the dtype of the output."""
        return (self.model if name == VALUE_HEAD else self.adapters).tensor(name).to(self.dtype)

    def write(self, folder: Path) -> None:
        """Write the folder of a peft adapter. Raises OSError."""
        assert self.trainable.lora is not None
        targets = peft_targets(adapters(self.shape, self.trainable), self.shape)
        write_peft_config(folder, self.trainable.lora, self.head, targets, self.base)
        # safetensors accepts only contiguous tensors.
        tensors = {f"{PREFIX}{name}": self.tensor(name).contiguous() for name in self.specs}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    def check(self, folder: Path) -> tuple[list[Check], dict[str, Any]]:
        """Return the checks that the written folder passed, and the digest of every tensor. Raises ConversionError
        that names the tensor that differs."""
        written = _Written(PeftFolder(folder))
        require_fits(written.folder, self.trainable, self.shape, self.head, "lora")
        checks, digests = verify.check_tensors(self, written)
        return [*checks, Check("configuration", 3, "rank, alpha, targets")], digests


@dataclass(frozen=True)
class _Written:
    """The tensors of a peft folder, as a `hugging_face.Weights`."""

    folder: PeftFolder

    @property
    def specs(self) -> dict[str, Spec]:
        """Shape and dtype of all tensors."""
        return {name: Spec(header.shape, DTYPES[header.kind]) for name, header in self.folder.headers.items()}

    def tensor(self, name: str) -> Tensor:
        """Return a tensor."""
        return self.folder.tensor(name)


def open_adapter(
    source: FoundCheckpoint, shape: ModelShape, like: str | None, dtype: torch.dtype | None
) -> StateAdapter:
    """Open the adapters of a state. `like`: the option `--like`; `dtype`: of the output, None: of the state.

    Raises RecipeError if the checkpoint has no adapters, or if their base is not a model that peft loads, and the
    errors of `open_megatron`.
    """
    frozen = read_frozen_base(source.folder) if source.kind == "megatron" else None
    if frozen is None or frozen.adapters is None:
        raise RecipeError(
            f"`{source.folder}` has no adapters: `--to peft` requires a saved state of a role with `train.lora`",
            hint="write the whole model: --to hf",
        )
    model = open_megatron(source.folder, shape, source.head, like=source.completed_by)
    folder = completing_folder(source.folder, frozen, source.completed_by)
    if is_torch_dist(folder):
        raise RecipeError(
            f"the base of the adapters in `{source.folder}` is `{folder}`, a Megatron folder, which peft cannot load",
            hint=f"ppoctl convert-ckpt {quoted(folder)} base --to hf  # then add --like base",
        )
    base = frozen.model if like is None else str(Path(like).absolute()) if Path(like).is_dir() else like
    assert model.adapters is not None
    return StateAdapter(
        model, model.adapters, shape, source.head, frozen.adapters, base, dtype or model.adapters.dtype
    )
