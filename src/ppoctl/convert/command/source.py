"""The source that `convert-ckpt` is pointed at: a Hugging Face folder, a Megatron torch_dist folder, or a run's saved
state."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppoctl.convert.tensors import Role
from ppoctl.convert.torch_dist import BACKEND, TorchDist, is_torch_dist
from ppoctl.errors import EnvironmentProblemError, RecipeError, quoted
from ppoctl.model.folder import model_folder, read_config
from ppoctl.runs.run_recipe import recipe_of
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths
from ppoctl.wire.sources import run_of, same_companions


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that was found, and how to read it."""

    kind: str
    """Format of the checkpoint, hf or megatron."""
    folder: Path
    """Folder with the weights."""
    like: Path
    """Folder with config.json and tokenizer."""
    role: Role
    description: str
    """The checkpoint in words, for people."""
    notes: tuple[str, ...] = ()
    """Notes that people should know besides."""


def find_source(path: str, *, like: str | None, role: Role | None, step: int | None) -> FoundCheckpoint:
    """Find the checkpoint of a command line. Raises RecipeError where its words do not go together or name no saved
    state, EnvironmentProblemError where there is no checkpoint, CorruptArtifactError where a run's state is not what
    was saved."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        return _state_of_run(RunPaths(folder), like, role or "actor", step)
    if step is not None:
        raise RecipeError(f"`--step {step}` is for a run, and `{path}` is none", hint="leave out --step")
    if (manifest := manifests.read(folder)) is not None and manifest.stage.startswith("state/"):
        return _saved_state(run_of(folder), folder, like, role)
    if is_torch_dist(folder):
        return _torch_dist(folder, like, role)
    _require_no_megatron(folder)
    if like is not None:
        raise RecipeError(f"`--like` is for a Megatron folder, and `{path}` is none", hint="leave out --like")
    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise EnvironmentProblemError(
            f"`{path}` is no run, no Megatron folder and no Hugging Face folder", hint=f"ls -a {quoted(folder)}"
        )
    return FoundCheckpoint("hf", folder, folder, role or _role_of_config(folder), f"Hugging Face folder {folder}")


def _state_of_run(paths: RunPaths, like: str | None, role: Role, step: int | None) -> FoundCheckpoint:
    run_dir.facts(paths)
    steps = paths.saved_steps(role)
    if not steps:
        raise RecipeError(
            f"run `{paths.root}` has no saved state of the {role} yet", hint=f"ppoctl status {quoted(paths.root)}"
        )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        there = ", ".join(map(str, steps))
        of_critic = " --role critic" if role == "critic" else ""
        raise RecipeError(
            f"run `{paths.root}` has no saved state of the {role} at step {wanted}; there are those of {there}",
            hint=f"ppoctl convert-ckpt {quoted(paths.root)} OUT --to hf{of_critic} --step {steps[-1]}",
        )
    return _saved_state(paths, paths.state(role, wanted), like, role)


def _saved_state(paths: RunPaths, folder: Path, like: str | None, role: Role | None) -> FoundCheckpoint:
    manifest = manifests.read(folder)
    assert manifest is not None
    kept: Role = "critic" if manifest.stage == "state/critic" else "actor"
    _require_role(kept, role, folder)
    manifests.verify(folder, manifest)
    base = model_folder(like) if like is not None else _base(paths, kept)
    health = "a health rule stopped the run at this state: its last step was not healthy"
    notes = () if manifest.extra.get("healthy", True) else (health,)
    return FoundCheckpoint("megatron", folder, base, kept, f"{kept} of `{paths.root}` at step {manifest.step}", notes)


def _base(paths: RunPaths, role: Role) -> Path:
    if not paths.recipe_toml.is_file():
        raise RecipeError(
            f"the state is in no run directory: `{paths.recipe_toml}` does not exist",
            hint="name a folder of the same model, for config and tokenizer: --like FOLDER",
        )
    return same_companions(paths, recipe_of(paths), role, otherwise=", or name a folder that has it: --like FOLDER")


def _torch_dist(folder: Path, like: str | None, role: Role | None) -> FoundCheckpoint:
    if like is None and not (folder / "config.json").is_file():
        raise RecipeError(
            f"`{folder}` does not say what model it is: it has no config.json",
            hint=f"name a folder of the same model: ppoctl convert-ckpt {quoted(folder)} OUT --to hf --like FOLDER",
        )
    output = TorchDist(folder).tensors.get("output_layer.weight")
    kept: Role = "critic" if output is not None and output.size[0] == 1 else "actor"
    _require_role(kept, role, folder)
    base = folder if like is None else model_folder(like)
    return FoundCheckpoint("megatron", folder, base, kept, f"Megatron folder {folder}")


def _require_role(kept: Role, asked: Role | None, folder: Path) -> None:
    if asked not in (None, kept):
        raise RecipeError(f"`{folder}` holds a model of the {kept}, not of the {asked}", hint="leave out --role")


def _require_no_megatron(folder: Path) -> None:
    """Raise where the folder looks like Megatron's and cannot be read."""
    inside = list(_iterations(folder))
    if inside:
        raise RecipeError(
            f"`{folder}` holds several checkpoints",
            hint=f"name one of them: {', '.join(str(each) for each in inside[-3:])}",
        )
    if (folder / BACKEND).is_file():
        says = f"`{folder}` has `{BACKEND}` and no `.metadata`"
        raise EnvironmentProblemError(says, hint=f"ls -la {quoted(folder)}")


def _iterations(folder: Path) -> Iterator[Path]:
    """Folders `iter_0000100` and the like, which Megatron-LM makes."""
    return (path for path in sorted(folder.glob("iter_*")) if is_torch_dist(path))


def _role_of_config(folder: Path) -> Role:
    """Role of a model by its configuration: a critic's names a class with a head of one label."""
    names = " ".join(read_config(folder).get("architectures") or ())
    return "critic" if "ForSequenceClassification" in names or "ForTokenClassification" in names else "actor"
