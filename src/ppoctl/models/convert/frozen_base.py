"""`frozen.json` of a saved state: the state contains only what trains, and this file names the model with the rest.

Imports no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ppoctl.core.errors import EnvironmentProblemError, StorageError, quoted
from ppoctl.models.folder import local_folder
from ppoctl.models.trainable import Trainable, trainable_from

FROZEN_FILE = "frozen.json"


@dataclass(frozen=True)
class FrozenBase:
    """The model that completes a state whose frozen weights are not saved."""

    model: str
    """Absolute folder or hub id of the model that the role started from."""
    digest: str
    """Digest of the frozen weights, in the dtype of the role, under Hugging Face names."""
    adapters: Trainable | None = None
    """The adapters that the state contains; None: no adapters. They are added to weights of the model."""


def read_frozen_base(folder: Path) -> FrozenBase | None:
    """Return the model that completes the state in a folder; None: the state is complete. Raises StorageError."""
    file = folder / FROZEN_FILE
    if not file.is_file():
        return None
    try:
        written = json.loads(file.read_text("utf-8"))
        if "adapters" in written:
            written["adapters"] = trainable_from(written["adapters"])
        return FrozenBase(**written)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"`{file}` cannot be read: {error}", hint=f"ls -la {quoted(folder)}") from error


def completing_folder(state: Path, base: FrozenBase, like: Path | None = None) -> Path:
    """Return the folder of the model that completes a state; `like` overrides its location. Raises
    EnvironmentProblemError if the model is not on this machine."""
    found = like or local_folder(base.model)
    if found is None:
        raise EnvironmentProblemError(
            f"`{state}` has only the weights that trained. The others are those of `{base.model}`, which is not on "
            "this machine",
            hint=f"put the model back, or name its folder: {complete_command(state)}",
        )
    return found


def complete_command(state: Path) -> str:
    """Return the command that writes a complete model from a state without frozen weights, if the base has moved."""
    return f"ppoctl convert-ckpt {quoted(state)} trained --to hf --like FOLDER"


def write_frozen_base(folder: Path, base: FrozenBase) -> Path:
    """Write the file, and return its path. Raises OSError."""
    file = folder / FROZEN_FILE
    written = {name: value for name, value in asdict(base).items() if value is not None}
    file.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    return file
