"""Fetch and check, on a login node, the assets that compute nodes cannot fetch (`ppoctl validate --stage`).

Files that this module reads are not read again when the run is submitted (`batch.digest_cache`).
"""

import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.algorithms.role_model import lora_starts, own_models, reward_models
from ppoctl.core.batch.digest_cache import OnDigestProgress, kept_digest
from ppoctl.core.errors import EnvironmentProblemError, MissingAssetError, PpoctlError, RecipeError, quoted
from ppoctl.core.finding import Finding, from_error
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.user_functions import file_of
from ppoctl.data.loaders import load_dataset
from ppoctl.data.row_files import files_of
from ppoctl.data.row_tables import StoredRows
from ppoctl.models.folder import NAMED_TEMPLATES, is_hub_id, local_folder
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.loading.rules.rows_rules import tables_of_rows
from ppoctl.recipe.paths import IMAGE, VARIABLE
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.schema_tree import values
from ppoctl.recipe.slurm_table import Apptainer, Pyxis, is_image_file
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.run.wire.sources import weights_and_configs
from ppoctl.start.slurm.script import PASSED_ON

_WANTED = (NAMED_TEMPLATES, "*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.*")
"""Files of a hub model that a run reads. `*` includes subfolders, which are excluded below."""
_SUBFOLDERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")
"""All subfolders whose name does not begin with `add`, as that of `NAMED_TEMPLATES` does."""
_TOKENIZER = ("tokenizer*", "chat_template*", NAMED_TEMPLATES, "special_tokens_map.json", "vocab.*", "merges.txt")


@dataclass(frozen=True)
class Asset:
    """One asset of a job, as found on this machine."""

    key: str
    """Recipe key that names the asset, or a description of the asset."""
    where: str
    size: int | None
    """Size in bytes; None: not a file."""
    sha256: str
    """Digest of the file, or of the names and digests of a folder's files; empty: not a file, or a secret file."""


def fetch(recipe: Recipe, notify: Callable[[str], None]) -> None:
    """Fetch missing hub models and data sets. Raises MissingAssetError if an asset cannot be fetched."""
    for key, path in _models(recipe):
        if local_folder(path) is None and is_hub_id(path):
            notify(f"fetching `{path}`")
            _download(key, path)
    for key, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and table.dataset is not None:
            notify(f"fetching `{table.dataset.path}`")
            load_dataset(table.dataset, dotted(key))


def assets(recipe: Recipe, progress: OnDigestProgress | None = None) -> Iterator[Asset]:
    """Yield every asset of the recipe that exists on this machine, with its digest; `faults` lists missing ones."""
    for key, path in _models(recipe):
        folder = local_folder(path)
        if folder is not None:
            yield _folder(dotted(key), folder, weights_and_configs(folder), progress)
            if key == ("model", "path"):
                files = sorted({file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()})
                yield _folder("tokenizer and template", folder, files, progress)
    for key, file in _files(recipe):
        if file.is_file():
            digest = kept_digest(file, progress)
            yield Asset(dotted(key), str(file), digest.size, digest.sha256)
    container, secrets = recipe.slurm.container, recipe.slurm.secrets
    if isinstance(container, Pyxis | Apptainer) and not is_image_file(container.image):
        yield Asset(dotted(IMAGE), f"{container.image} (the nodes fetch it from its registry)", None, "")
    if secrets is not None and Path(secrets).is_file():
        yield Asset("slurm.secrets", secrets, Path(secrets).stat().st_size, "")
    if recipe.slurm.setup:
        count = len(recipe.slurm.setup)
        yield Asset("slurm.setup", "1 line of shell" if count == 1 else f"{count} lines of shell", None, "")


def faults(loaded: Loaded) -> list[Finding]:
    """Return the problems that would stop a job: missing files, secrets, shell lines, or variables that a job does
    not receive."""
    return [from_error(error, loaded.place(key), kind="asset") for key, error in _faults(loaded.recipe)]


def job_faults(loaded: Loaded) -> list[Finding]:
    """Return the problems that affect only jobs, not runs on this machine. A job would meet these problems only hours
    later."""
    problems = (*_secrets_faults(loaded.recipe), *_setup_faults(loaded.recipe), *_variable_faults(loaded.recipe))
    return [from_error(error, loaded.place(key), kind="asset") for key, error in problems]


def _faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    for key, path in _models(recipe):
        if local_folder(path) is None:
            yield (
                key,
                MissingAssetError(
                    f"`{dotted(key)}` is `{path}`: it is not on this machine", hint=f"ls {quoted(path)}"
                ),
            )
    for key, file in _files(recipe):
        if not file.is_file() or not os.access(file, os.R_OK):
            reason = "cannot be read" if file.exists() else "no such file"
            yield key, MissingAssetError(f"`{dotted(key)}` is `{file}`: {reason}", hint=f"ls -l {quoted(file)}")
    yield from _secrets_faults(recipe)
    yield from _setup_faults(recipe)
    yield from _variable_faults(recipe)


def _secrets_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    secrets, key = recipe.slurm.secrets, ("slurm", "secrets")
    if secrets is None:
        return
    try:
        status = Path(secrets).stat()
    except OSError as error:
        message = f"`slurm.secrets` is `{secrets}`: {str(error.strerror).lower()}"
        yield key, MissingAssetError(message, hint=f"ls -l {quoted(secrets)}")
        return
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        message = f"`slurm.secrets` is `{secrets}`, which is not a regular file that you own"
        yield key, EnvironmentProblemError(message, hint=f"ls -l {quoted(secrets)}")
    elif status.st_mode & 0o077:
        message = f"`slurm.secrets` is `{secrets}`, but others may read it (mode {stat.S_IMODE(status.st_mode):o})"
        yield key, EnvironmentProblemError(message, hint=f"chmod 600 {quoted(secrets)}")
    elif (error_at := _syntax(Path(secrets).read_text("utf-8", errors="replace"))) is not None:
        # Do not use the shell's own message: it quotes the line, and so the secret.
        message = f"`slurm.secrets` is `{secrets}`: line {error_at[0]} is not valid shell"
        yield key, EnvironmentProblemError(message, hint=f"bash -n {quoted(secrets)}")


def _setup_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    error_at = _syntax("\n".join(recipe.slurm.setup))
    if error_at is not None:
        line, message = error_at
        hint = "ppoctl plan RECIPE --sbatch | bash -n"
        yield (
            ("slurm", "setup"),
            RecipeError(f"line {line} of `slurm.setup` is not valid shell: {message}", hint=hint),
        )


def _variable_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    """Yield the problem of a variable in `tracking.uri`. No other value keeps its variables until a run starts."""
    uri = recipe.tracking.uri if isinstance(recipe.tracking, MlflowTracking) else None
    variable = VARIABLE.match(uri or "")
    if variable is None:
        return
    name, table = variable[1] or variable[2], recipe.slurm
    if name in table.environment or name in table.pass_on or name in PASSED_ON or _exports(table.secrets, name):
        return
    message = f"`tracking.uri` is `{uri}`, but a job does not receive `{name}` from this shell"
    hint = "export it in a file of mode 600 and name the file: --set slurm.secrets=FILE"
    yield ("tracking", "uri"), RecipeError(message, hint=hint)


def _exports(secrets: str | None, name: str) -> bool:
    try:
        text = "" if secrets is None else Path(secrets).read_text("utf-8", errors="replace")
    except OSError:
        return False
    return re.search(rf"^\s*(?:export\s+)?{re.escape(name)}=", text, re.MULTILINE) is not None


def _syntax(text: str) -> tuple[int, str] | None:
    """Return the line and message of bash for text that is not valid shell; None: the text is valid, or bash is
    missing."""
    try:
        process = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not process.returncode:
        return None
    error = re.search(r"line (\d+): (.*)", process.stderr)
    return (int(error[1]), error[2]) if error else (1, process.stderr.strip())


def _models(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    yield ("model", "path"), recipe.model.path
    yield from ((("model", role, "path"), table.path) for role, table in own_models(recipe).items())
    yield from (((role, "train", "lora", "start"), start) for role, start in lora_starts(recipe).items())
    yield from (((*key, "path"), table.path) for key, table in reward_models(recipe).items())


def _files(recipe: Recipe) -> Iterator[tuple[KeyPath, Path]]:
    for key, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and table.path is not None:
            yield from (((*key, "path"), file) for file in _files_if_there(table, dotted(key)))
        if table.prompt_file is not None:
            yield (*key, "prompt_file"), Path(table.prompt_file)
    for value in values(recipe):
        if value.path[-1] == "function" and (file := file_of(value.value)) is not None:
            yield value.path, file
    container = recipe.slurm.container
    if isinstance(container, Pyxis | Apptainer) and is_image_file(container.image):
        yield IMAGE, Path(container.image)


def _files_if_there(table: StoredRows, key: str) -> list[Path]:
    """Return the files of a table; if some are missing, the paths in the recipe."""
    try:
        return files_of(table, key=key)
    except (MissingAssetError, RecipeError):
        return [Path(table.path)] if isinstance(table.path, str) else [Path(path) for path in table.path or ()]


def _folder(key: str, folder: Path, files: Sequence[Path], progress: OnDigestProgress | None) -> Asset:
    digests = [(file.name, kept_digest(file, progress)) for file in files]
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in digests)
    size = sum(digest.size for _, digest in digests)
    return Asset(key, str(folder), size, hashlib.sha256(listing.encode()).hexdigest())


def _download(key: KeyPath, path: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot_download(path, allow_patterns=list(_WANTED), ignore_patterns=list(_SUBFOLDERS))
    except Exception as error:  # errors of the hub, the network or the disk all have the same result
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        hint = f"hf download {quoted(path)}  # on a machine with network access"
        raise MissingAssetError(f"`{dotted(key)}` is `{path}`: it cannot be fetched: {reason}", hint=hint) from error
