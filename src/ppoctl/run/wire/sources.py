"""Sources of a run (models, tokenizer and data), and the check that they have not changed."""

import hashlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from ppoctl.algorithms.role_model import lora_starts, model_of, own_models, reward_models
from ppoctl.core.batch.digest import FileDigest, file_digest
from ppoctl.core.errors import StorageError
from ppoctl.core.key_path import dotted
from ppoctl.data.chat import ChatTemplate
from ppoctl.data.source import PromptSource
from ppoctl.models.convert.frozen_base import FROZEN_FILE
from ppoctl.models.convert.peft_config import CONFIG as ADAPTER_CONFIG
from ppoctl.recipe.schema import Recipe
from ppoctl.store import manifest as manifests
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saved_by import state_manifest

CONFIGS = ("config.json", "generation_config.json", FROZEN_FILE, ADAPTER_CONFIG)
"""Files of a model folder that affect results, in addition to the weights."""

COMPANIONS = "model.companions"
"""Name of the digest of the files that are exported with the weights: configuration, tokenizer and chat template."""


CLOCK = "clock"
"""Name of the time that chat templates read, among the sources in run.json."""

Digest = Callable[[Path], FileDigest | None]
"""Function that returns the digest of a file, or None if the file does not exist. Login nodes use a function with a
cache."""


def source_digests(recipe: Recipe, prompt_source: PromptSource) -> dict[str, str]:
    """Return the digests of a run's sources: model files, the files that are exported with them, the tokenizer with
    its chat template, and the data. If a chat template reads the clock, the time that it reads is a source too."""
    reads_clock = prompt_source.reads_clock or _reward_model_reads_clock(recipe)
    clock = {CLOCK: prompt_source.clock.isoformat()} if reads_clock and prompt_source.clock is not None else {}
    return {**model_digests(recipe), **prompt_source.digests, **clock}


def _reward_model_reads_clock(recipe: Recipe) -> bool:
    from ppoctl.models.folder import model_folder

    folders = [model_folder(table.path) for table in reward_models(recipe).values() if table.template == "own"]
    return any(ChatTemplate.of_folder(folder).reads_clock for folder in folders)


def clock_of(run: RecordedRun) -> datetime:
    """Return the local time that the chat templates of a run read: that of its creation."""
    recorded = _recorded(run).get(CLOCK)
    if recorded is not None:
        return datetime.fromisoformat(recorded)
    return datetime.fromtimestamp(run.facts["created"]).replace(microsecond=0)


def clock_notes(digests: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note on the time that the chat templates of a run read; empty: they read none."""
    read = digests.get(CLOCK)
    return () if read is None else (f"a chat template reads the clock: every prompt of this run has the time {read}",)


def model_digests(recipe: Recipe, digest_of_file: Digest = file_digest) -> dict[str, str]:
    """Return the digests of the models of all trained roles, of the files that are exported with the models, and of
    each reward model. The digest of a model includes the adapters that the role starts from.

    Raises CorruptArtifactError if one of the models is a saved state that was changed after it was written.
    """
    from ppoctl.models.convert.model_files import companions_digest
    from ppoctl.models.folder import model_folder

    folder = model_folder(recipe.model.path)
    files = {path.name: digest_of_file(path) for path in weights_and_configs(folder)}
    companions = {COMPANIONS: companions_digest(folder)}
    for role, table in own_models(recipe).items():
        own_folder = model_folder(table.path)
        own_files = {path.name: digest_of_file(path) for path in weights_and_configs(own_folder)}
        _require_as_saved(own_folder, own_files)
        files |= {f"{role}/{name}": digest for name, digest in own_files.items()}
        companions[companions_of(role)] = companions_digest(own_folder)
    for role, start in lora_starts(recipe).items():
        adapter = weights_and_configs(model_folder(start))
        files |= {f"{role}.train.lora.start/{path.name}": digest_of_file(path) for path in adapter}
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in files.items() if digest is not None)
    digests = {"model": hashlib.sha256(listing.encode()).hexdigest(), **companions}
    return digests | _reward_model_digests(recipe, digest_of_file)


def companions_of(role: str) -> str:
    """Return the name of the digest `COMPANIONS` of a role's own model."""
    return f"model.{role}.companions"


def _reward_model_digests(recipe: Recipe, digest_of_file: Digest) -> dict[str, str]:
    """Return the digest of each reward model, including the files next to its weights, by the recipe key of the
    model's path."""
    from ppoctl.models.convert.model_files import companions_digest
    from ppoctl.models.folder import model_folder

    digests: dict[str, str] = {}
    for key, table in reward_models(recipe).items():
        folder = model_folder(table.path)
        files = {path.name: digest_of_file(path) for path in weights_and_configs(folder)}
        _require_as_saved(folder, files)
        lines = [f"{name} {digest.sha256}" for name, digest in files.items() if digest is not None]
        listing = "\n".join([*lines, companions_digest(folder)])
        digests[f"{dotted(key)}.path"] = hashlib.sha256(listing.encode()).hexdigest()
    return digests


def reward_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of all reward models in the digests of a run's sources; empty: no reward model."""
    lines = sorted(f"{name} {digest}" for name, digest in digests.items() if name.startswith("reward."))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""


def _require_as_saved(folder: Path, digests: Mapping[str, FileDigest | None]) -> None:
    """Compare all files of a saved state with the manifest of the state. Other folders have no manifest and are not
    checked."""
    manifest = state_manifest(folder)
    for name, expected in () if manifest is None else manifest.files.items():
        # Files that the model digest does not cover are small: the index of tensors, and the data that is equal on
        # all ranks.
        digest = digests[name] if name in digests else file_digest(folder / name)
        manifests.verify_bytes(folder / name, digest, expected)


def weights_and_configs(folder: Path) -> list[Path]:
    """Return the files of a model folder that affect results, by name."""
    kinds = (".safetensors", ".distcp")
    return sorted(path for path in folder.iterdir() if path.suffix in kinds or path.name in CONFIGS)


def run_of(state: Path) -> RunPaths:
    """Return the paths of the run that contains the folder `states/ROLE/STEP`, independent of the current
    directory."""
    return RunPaths(state.resolve().parent.parent.parent)


def require_same_sources(run: RecordedRun, digests: Mapping[str, str]) -> None:
    """Raise StorageError if a source differs from the source that the run was made from. The error names the
    source."""
    for name, recorded in _recorded(run).items():
        if digests.get(name) != recorded:
            raise StorageError(
                f"`{name}` is not what run `{run.paths.root}` was made from "
                f"(digest {digests.get(name, 'absent')[:12]}, recorded {recorded[:12]})",
                hint=f"put it back, or start a new run; the recorded recipe: {run.paths.recipe_toml}",
            )


def same_companions(run: RecordedRun, recipe: Recipe, role: str, *, otherwise: str = "") -> Path:
    """Return the folder of the model that the role started from.

    Raises StorageError if the configuration or tokenizer in the folder has changed since training: the states would
    then be loaded with another configuration. `otherwise` is added to the hint.
    """
    from ppoctl.models.convert.model_files import companions_digest
    from ppoctl.models.folder import model_folder

    model = model_of(recipe, role)
    folder = model_folder(model.path)
    recorded = _recorded(run).get(companions_of(role) if role in own_models(recipe) else COMPANIONS)
    if recorded is not None and companions_digest(folder) != recorded:
        raise StorageError(
            f"config.json or the tokenizer in `{folder}` is not what run `{run.paths.root}` was made from",
            hint=f"put it back{otherwise}",
        )
    return folder


def _recorded(run: RecordedRun) -> dict[str, str]:
    digests: dict[str, str] = run.facts.get("sources", {})
    return digests


def recorded_reward_digest(run: RecordedRun) -> str:
    """Return the `reward_digest` of the sources that the run was made from."""
    return reward_digest(_recorded(run))
