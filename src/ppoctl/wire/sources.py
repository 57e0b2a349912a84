"""What a run was made from, and whether it is still there."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from ppoctl.batch.digest import FileDigest, file_digest
from ppoctl.data.source import PromptSource
from ppoctl.errors import StorageError
from ppoctl.recipe.schema import Recipe
from ppoctl.store import run_dir
from ppoctl.store.layout import RunLayout

CONFIGS = ("config.json", "generation_config.json")
"""Besides the weights, what of a model folder decides results."""

COMPANIONS = "model.companions"
"""Configuration, tokenizer and chat template: what goes along with exported weights."""


Digest = Callable[[Path], FileDigest | None]
"""Digest of a file, or None where there is none; one that was kept will do on a login node."""


def source_digests(recipe: Recipe, questions: PromptSource) -> dict[str, str]:
    """What the run is made from: digests of the model's files, of those beside its weights, of the tokenizer with its
    template, and of the data."""
    return {**model_digests(recipe), **questions.digests}


def model_digests(recipe: Recipe, digest_of_file: Digest = file_digest) -> dict[str, str]:
    """Digests of the model's files, and of those beside its weights."""
    from ppoctl.convert.companions import companions_digest
    from ppoctl.model.folder import model_folder

    folder, critic = model_folder(recipe.model.path), recipe.model.critic
    files = [(path.name, path) for path in weights_and_configs(folder)]
    if critic is not None:
        files += [(f"critic/{path.name}", path) for path in weights_and_configs(model_folder(critic))]
    found = ((name, digest_of_file(path)) for name, path in files)
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in found if digest is not None)
    model = hashlib.sha256(listing.encode()).hexdigest()
    return {"model": model, COMPANIONS: companions_digest(folder)}


def weights_and_configs(folder: Path) -> list[Path]:
    """The files of a model folder that decide results, by name."""
    kinds = (".safetensors", ".distcp")
    return sorted(path for path in folder.iterdir() if path.suffix in kinds or path.name in CONFIGS)


def run_of(state: Path) -> RunLayout:
    """The run whose `states/ROLE/STEP` this folder is, wherever the command stands."""
    return RunLayout(state.resolve().parent.parent.parent)


def require_same_sources(layout: RunLayout, digests: Mapping[str, str]) -> None:
    """Raise StorageError naming the source that is not what the run was made from."""
    for name, recorded in _recorded(layout).items():
        if digests.get(name) != recorded:
            raise StorageError(
                f"`{name}` is not what run `{layout.root}` was made from "
                f"(digest {digests.get(name, 'absent')[:12]}, recorded {recorded[:12]})",
                hint=f"put it back, or start a new run; the recorded recipe: {layout.recipe_toml}",
            )


def require_same_companions(layout: RunLayout, folder: Path, *, otherwise: str = "") -> None:
    """Raise StorageError where what lies beside the weights of the run's model source is no longer what the run was
    trained with: its states would be read under another configuration. `otherwise`: what else mends it."""
    from ppoctl.convert.companions import companions_digest

    recorded = _recorded(layout).get(COMPANIONS)
    if recorded is not None and companions_digest(folder) != recorded:
        raise StorageError(
            f"config.json or the tokenizer in `{folder}` is not what run `{layout.root}` was made from",
            hint=f"put it back{otherwise}",
        )


def _recorded(layout: RunLayout) -> dict[str, str]:
    found: dict[str, str] = run_dir.facts(layout).get("sources", {})
    return found
