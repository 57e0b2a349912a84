"""What a run was made from, and whether it is still there."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from ppoctl.batch.digest import FileDigest, file_digest
from ppoctl.data.source import PromptSource
from ppoctl.errors import StorageError
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saved_by import state_manifest

CONFIGS = ("config.json", "generation_config.json")
"""Besides the weights, what of a model folder decides results."""

COMPANIONS, CRITIC_COMPANIONS = "model.companions", "model.critic.companions"
"""Configuration, tokenizer and chat template: what goes along with exported weights."""


Digest = Callable[[Path], FileDigest | None]
"""Digest of a file, or None where there is none; one that was kept will do on a login node."""


def source_digests(recipe: Recipe, questions: PromptSource) -> dict[str, str]:
    """What the run is made from: digests of the model's files, of those beside its weights, of the tokenizer with its
    template, and of the data."""
    return {**model_digests(recipe), **questions.digests}


def model_digests(recipe: Recipe, digest_of_file: Digest = file_digest) -> dict[str, str]:
    """Digests of the files of both roles' models, of those beside their weights, and of each reward model. Raises
    CorruptArtifactError where one of them is a saved state that is not as it was written."""
    from ppoctl.convert.model_files import companions_digest
    from ppoctl.model.folder import model_folder

    folder = model_folder(recipe.model.path)
    found = {path.name: digest_of_file(path) for path in weights_and_configs(folder)}
    companions = {COMPANIONS: companions_digest(folder)}
    if recipe.model.critic is not None:
        own = model_folder(recipe.model.critic.path)
        its = {path.name: digest_of_file(path) for path in weights_and_configs(own)}
        _require_as_saved(own, its)
        found |= {f"critic/{name}": digest for name, digest in its.items()}
        companions[CRITIC_COMPANIONS] = companions_digest(own)
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in found.items() if digest is not None)
    found_here = {"model": hashlib.sha256(listing.encode()).hexdigest(), **companions}
    return found_here | _reward_model_digests(recipe, digest_of_file)


def _reward_model_digests(recipe: Recipe, digest_of_file: Digest) -> dict[str, str]:
    """Digest of each reward model with what lies beside its weights, by the key of its path."""
    from ppoctl.convert.model_files import companions_digest
    from ppoctl.model.folder import model_folder

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
    """Digest of all reward models among those of a run's sources; empty: there is none."""
    found = sorted(f"{name} {digest}" for name, digest in digests.items() if name.startswith("reward."))
    return hashlib.sha256("\n".join(found).encode()).hexdigest() if found else ""


def _require_as_saved(folder: Path, found: Mapping[str, FileDigest | None]) -> None:
    """Compare all files of a saved state with its manifest; any other folder has none."""
    manifest = state_manifest(folder)
    for name, expected in () if manifest is None else manifest.files.items():
        # What is no part of a model's digest is small: where which tensor stands, and what all ranks have.
        digest = found[name] if name in found else file_digest(folder / name)
        manifests.verify_bytes(folder / name, digest, expected)


def weights_and_configs(folder: Path) -> list[Path]:
    """The files of a model folder that decide results, by name."""
    kinds = (".safetensors", ".distcp")
    return sorted(path for path in folder.iterdir() if path.suffix in kinds or path.name in CONFIGS)


def run_of(state: Path) -> RunPaths:
    """The run whose `states/ROLE/STEP` this folder is, wherever the command stands."""
    return RunPaths(state.resolve().parent.parent.parent)


def require_same_sources(paths: RunPaths, digests: Mapping[str, str]) -> None:
    """Raise StorageError naming the source that is not what the run was made from."""
    for name, recorded in _recorded(paths).items():
        if digests.get(name) != recorded:
            raise StorageError(
                f"`{name}` is not what run `{paths.root}` was made from "
                f"(digest {digests.get(name, 'absent')[:12]}, recorded {recorded[:12]})",
                hint=f"put it back, or start a new run; the recorded recipe: {paths.recipe_toml}",
            )


def same_companions(paths: RunPaths, recipe: Recipe, role: str, *, otherwise: str = "") -> Path:
    """Folder of the model that the role started from. Raises StorageError where what lies beside its weights is no
    longer what the run was trained with: its states would be read under another configuration. `otherwise`: what else
    mends it."""
    from ppoctl.convert.model_files import companions_digest
    from ppoctl.model.folder import model_folder

    model = model_of(recipe, role)
    folder = model_folder(model.path)
    recorded = _recorded(paths).get(CRITIC_COMPANIONS if "critic" in model.key else COMPANIONS)
    if recorded is not None and companions_digest(folder) != recorded:
        raise StorageError(
            f"config.json or the tokenizer in `{folder}` is not what run `{paths.root}` was made from",
            hint=f"put it back{otherwise}",
        )
    return folder


def _recorded(paths: RunPaths) -> dict[str, str]:
    found: dict[str, str] = run_dir.facts(paths).get("sources", {})
    return found


def recorded_reward_digest(paths: RunPaths) -> str:
    """The `reward_digest` of what the run was made from."""
    return reward_digest(_recorded(paths))
