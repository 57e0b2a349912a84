"""`frozen.json` of a saved state: the state contains only what trains, and this file names the model with the rest.

Imports no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ppoctl.errors import EnvironmentProblemError, StorageError, quoted
from ppoctl.model.folder import local_folder

FROZEN_FILE = "frozen.json"


@dataclass(frozen=True)
class FrozenBase:
    """The model that completes a state whose frozen weights are not saved."""

    model: str
    """Absolute folder or hub id of the model that the role started from."""
    digest: str
    """Digest of the frozen weights, in the dtype of the role, under Hugging Face names."""


def read_frozen_base(folder: Path) -> FrozenBase | None:
    """Return the model that completes the state in a folder; None: the state is complete. Raises StorageError."""
    file = folder / FROZEN_FILE
    if not file.is_file():
        return None
    try:
        return FrozenBase(**json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError) as error:
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
    return f"ppoctl convert-ckpt {quoted(state)} OUT --to hf --like FOLDER"


def write_frozen_base(folder: Path, base: FrozenBase) -> Path:
    """Write the file, and return its path. Raises OSError."""
    file = folder / FROZEN_FILE
    file.write_text(json.dumps(asdict(base), indent=1) + "\n", "utf-8")
    return file
