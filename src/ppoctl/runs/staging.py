"""What compute nodes cannot fetch, fetched or checked where a person is logged in: `ppoctl validate --stage`. What is
read here is not read again when the run is submitted (`batch.kept_digests`)."""

import hashlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.batch.digest_cache import OnDigestProgress, kept_digest
from ppoctl.data.loaders import load_dataset
from ppoctl.errors import EnvironmentProblemError, MissingAssetError, PpoctlError, RecipeError, quoted
from ppoctl.loading.load import Loaded
from ppoctl.loading.problems import Problem
from ppoctl.loading.rules.rows import tables_of_rows
from ppoctl.model.folder import is_hub_id, local_folder
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.paths import IMAGE, VARIABLE
from ppoctl.recipe.row_files import files_of
from ppoctl.recipe.rows import PythonRows, StoredRows
from ppoctl.recipe.schema import MlflowTracking, Recipe
from ppoctl.recipe.slurm import Apptainer, Pyxis, is_image_file
from ppoctl.slurm.script import PASSED_ON
from ppoctl.wire.sources import weights_and_configs

_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.*")
"""Files of a hub model that a run reads; of its folders none."""
_TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "vocab.*", "merges.txt")


@dataclass(frozen=True)
class Asset:
    """One thing that a job needs, as it lies here."""

    key: str
    """The key of the recipe that names it, or what it is."""
    where: str
    size: int | None
    """Bytes; None: it is no file."""
    sha256: str
    """Digest of the file, or of the names and digests of a folder's files; empty: it is no file, or a secret one."""


def fetch(recipe: Recipe, notify: Callable[[str], None]) -> None:
    """Fetch the hub models and data sets that are not here. Raises MissingAssetError where one cannot be had."""
    for key, path in _models(recipe):
        if local_folder(path) is None and is_hub_id(path):
            notify(f"fetching `{path}`")
            _download(key, path)
    for key, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and table.dataset is not None:
            notify(f"fetching `{table.dataset.path}`")
            load_dataset(table.dataset, dotted(key))


def assets(recipe: Recipe, told: OnDigestProgress | None = None) -> Iterator[Asset]:
    """Everything that the recipe names and that lies here, read for its digest; `faults` says what is missing."""
    for key, path in _models(recipe):
        folder = local_folder(path)
        if folder is not None:
            yield _folder(dotted(key), folder, weights_and_configs(folder), told)
            if key == ("model", "path"):
                files = sorted({file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()})
                yield _folder("tokenizer and template", folder, files, told)
    for key, file in _files(recipe):
        if file.is_file():
            digest = kept_digest(file, told)
            yield Asset(dotted(key), str(file), digest.size, digest.sha256)
    container, secrets = recipe.slurm.container, recipe.slurm.secrets
    if isinstance(container, Pyxis | Apptainer) and not is_image_file(container.image):
        yield Asset(dotted(IMAGE), f"{container.image} (the nodes fetch it from its registry)", None, "")
    if secrets is not None and Path(secrets).is_file():
        yield Asset("slurm.secrets", secrets, Path(secrets).stat().st_size, "")
    if recipe.slurm.setup:
        count = len(recipe.slurm.setup)
        yield Asset("slurm.setup", "1 line of shell" if count == 1 else f"{count} lines of shell", None, "")


def faults(loaded: Loaded) -> list[Problem]:
    """What a job would not find or could not run: files, secrets, lines of shell, variables that it is not given."""
    return [Problem(loaded.origins[dotted(key)], e.message, e.hint, type(e)) for key, e in _faults(loaded.recipe)]


def job_faults(loaded: Loaded) -> list[Problem]:
    """Those of the `faults` that no run on this machine meets, and that a job would end with in hours."""
    found = (*_secrets_faults(loaded.recipe), *_setup_faults(loaded.recipe), *_variable_faults(loaded.recipe))
    return [Problem(loaded.origins[dotted(key)], e.message, e.hint, type(e)) for key, e in found]


def _faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    for key, path in _models(recipe):
        if local_folder(path) is None:
            yield key, MissingAssetError(f"`{dotted(key)}` is `{path}`: it is not here", hint=f"ls {quoted(path)}")
    for key, file in _files(recipe):
        if not file.is_file() or not os.access(file, os.R_OK):
            what = "cannot be read" if file.exists() else "no such file"
            yield key, MissingAssetError(f"`{dotted(key)}` is `{file}`: {what}", hint=f"ls -l {quoted(file)}")
    yield from _secrets_faults(recipe)
    yield from _setup_faults(recipe)
    yield from _variable_faults(recipe)


def _secrets_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    secrets, key = recipe.slurm.secrets, ("slurm", "secrets")
    if secrets is None:
        return
    try:
        mode = Path(secrets).stat()
    except OSError as error:
        says = f"`slurm.secrets` is `{secrets}`: {str(error.strerror).lower()}"
        yield key, MissingAssetError(says, hint=f"ls -l {quoted(secrets)}")
        return
    if not stat.S_ISREG(mode.st_mode) or mode.st_uid != os.getuid():
        says = f"`slurm.secrets` is `{secrets}`, which is no file of your own"
        yield key, EnvironmentProblemError(says, hint=f"ls -l {quoted(secrets)}")
    elif mode.st_mode & 0o077:
        says = f"`slurm.secrets` is `{secrets}`, and others may read it (mode {stat.S_IMODE(mode.st_mode):o})"
        yield key, EnvironmentProblemError(says, hint=f"chmod 600 {quoted(secrets)}")
    elif (wrong := _syntax(Path(secrets).read_text("utf-8", errors="replace"))) is not None:
        # Not the sentence of the shell, which quotes the line.
        says = f"`slurm.secrets` is `{secrets}`: line {wrong[0]} is no shell"
        yield key, EnvironmentProblemError(says, hint=f"bash -n {quoted(secrets)}")


def _setup_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    wrong = _syntax("\n".join(recipe.slurm.setup))
    if wrong is not None:
        line, says = wrong
        hint = "ppoctl plan RECIPE --sbatch | bash -n"
        yield ("slurm", "setup"), RecipeError(f"line {line} of `slurm.setup` is no shell: {says}", hint=hint)


def _variable_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, PpoctlError]]:
    """The tracking URI is the one value that stays a variable until a run is at work."""
    uri = recipe.tracking.uri if isinstance(recipe.tracking, MlflowTracking) else None
    found = VARIABLE.match(uri or "")
    if found is None:
        return
    name, table = found[1] or found[2], recipe.slurm
    if name in table.environment or name in table.pass_on or name in PASSED_ON or _exports(table.secrets, name):
        return
    says = f"`tracking.uri` is `{uri}`, and a job does not get `{name}` from this shell"
    hint = "export it in a file of mode 600 and name that: --set slurm.secrets=FILE"
    yield ("tracking", "uri"), RecipeError(says, hint=hint)


def _exports(secrets: str | None, name: str) -> bool:
    try:
        text = "" if secrets is None else Path(secrets).read_text("utf-8", errors="replace")
    except OSError:
        return False
    return re.search(rf"^\s*(?:export\s+)?{re.escape(name)}=", text, re.MULTILINE) is not None


def _syntax(text: str) -> tuple[int, str] | None:
    """Line and complaint of bash where it cannot read the text; None: it can, or is not here."""
    try:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not done.returncode:
        return None
    found = re.search(r"line (\d+): (.*)", done.stderr)
    return (int(found[1]), found[2]) if found else (1, done.stderr.strip())


def _models(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    yield ("model", "path"), recipe.model.path
    if recipe.model.critic is not None:
        yield ("model", "critic", "path"), recipe.model.critic.path
    yield from (((*key, "path"), table.path) for key, table in reward_models(recipe).items())


def _files(recipe: Recipe) -> Iterator[tuple[KeyPath, Path]]:
    for key, table in tables_of_rows(recipe):
        if isinstance(table, StoredRows) and table.path is not None:
            yield from (((*key, "path"), file) for file in _files_if_there(table, dotted(key)))
        if isinstance(table, PythonRows):
            yield (*key, "function"), Path(table.function.rpartition(":")[0])
        if table.prompt_file is not None:
            yield (*key, "prompt_file"), Path(table.prompt_file)
    container = recipe.slurm.container
    if isinstance(container, Pyxis | Apptainer) and is_image_file(container.image):
        yield IMAGE, Path(container.image)


def _files_if_there(table: StoredRows, key: str) -> list[Path]:
    """Files of a table; where they are not all there, what names them."""
    try:
        return files_of(table, key=key)
    except (MissingAssetError, RecipeError):
        return [Path(table.path)] if isinstance(table.path, str) else [Path(each) for each in table.path or ()]


def _folder(key: str, folder: Path, files: Sequence[Path], told: OnDigestProgress | None) -> Asset:
    found = [(file.name, kept_digest(file, told)) for file in files]
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in found)
    size = sum(digest.size for _, digest in found)
    return Asset(key, str(folder), size, hashlib.sha256(listing.encode()).hexdigest())


def _download(key: KeyPath, path: str) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        snapshot_download(path, allow_patterns=list(_WANTED), ignore_patterns=["*/*"])
    except Exception as error:  # the hub's own, of the network, of the disk: all end the same way
        says = next(iter(str(error).splitlines()), type(error).__name__)
        hint = f"hf download {quoted(path)}  # where there is a network"
        raise MissingAssetError(f"`{dotted(key)}` is `{path}`: it cannot be fetched: {says}", hint=hint) from error
