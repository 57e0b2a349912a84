"""What a run was made from, and whether it is still there."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ppoctl.batch.digest import file_digest
from ppoctl.data.source import PromptSource
from ppoctl.errors import EnvironmentProblemError, StorageError
from ppoctl.recipe.schema import Recipe
from ppoctl.store import run_dir
from ppoctl.store.layout import RunLayout

CONFIGS = ("config.json", "generation_config.json")
"""Besides the weights, what of a model folder decides results."""

COMPANIONS = "model.companions"
"""Configuration, tokenizer and chat template: what goes along with exported weights."""


def source_digests(recipe: Recipe, questions: PromptSource) -> dict[str, str]:
    """What the run is made from: digests of the model's files, of those beside its weights, of the tokenizer with its
    template, and of the data."""
    from ppoctl.convert.companions import companions_digest
    from ppoctl.convert.source import model_folder

    folder = model_folder(recipe.model.path)
    files = sorted(path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name in CONFIGS)
    if not any(path.suffix == ".safetensors" for path in files):
        raise EnvironmentProblemError(
            f"no `.safetensors` file in model folder `{folder}`", hint="name a folder that `save_pretrained` wrote"
        )
    found = [(path.name, file_digest(path)) for path in files]
    if recipe.model.critic is not None:
        found += [
            (f"critic/{path.name}", file_digest(path)) for path in _critic_files(model_folder(recipe.model.critic))
        ]
    listing = "\n".join(f"{name} {digest.sha256}" for name, digest in found if digest is not None)
    model = hashlib.sha256(listing.encode()).hexdigest()
    return {"model": model, COMPANIONS: companions_digest(folder), **questions.digests}


def _critic_files(folder: Path) -> list[Path]:
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
