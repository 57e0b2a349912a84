"""The source of `convert-ckpt`: a Hugging Face folder, a Megatron torch_dist folder, or a saved state of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ppoctl.algorithms.roles import POLICY, head_of, role_with
from ppoctl.core.errors import EnvironmentProblemError, RecipeError, quoted
from ppoctl.models.convert.frozen_base import completing_folder, read_frozen_base
from ppoctl.models.convert.peft_folder import is_peft_folder
from ppoctl.models.convert.torch_dist import BACKEND, TorchDist, is_torch_dist
from ppoctl.models.folder import model_folder, read_config
from ppoctl.models.head import Head
from ppoctl.run.run_recipe import recipe_of
from ppoctl.run.wire.sources import run_of, same_companions
from ppoctl.store import manifest as manifests
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and how to read it."""

    kind: str
    """Format of the checkpoint: hf or megatron."""
    folder: Path
    """Folder with the weights."""
    like: Path
    """Folder with config.json and tokenizer."""
    role: str
    description: str
    """Description of the checkpoint for users."""
    notes: tuple[str, ...] = ()
    """Further notes for users."""
    completed_by: Path | None = None
    """Folder that `--like` names, with the frozen weights of a saved state; None: where `frozen.json` says."""

    @property
    def is_complete(self) -> bool:
        """Whether the folder has all weights. A saved state of a partly trained role lacks the frozen weights."""
        return self.kind == "hf" or read_frozen_base(self.folder) is None

    @property
    def head(self) -> Head:
        """Head of the model."""
        return head_of(self.role)


def find_source(path: str, *, like: str | None, role: str | None, step: int | None) -> FoundCheckpoint:
    """Find the checkpoint that the command line names. Raises RecipeError if the options conflict or name no saved
    state, EnvironmentProblemError if the path has no checkpoint, and CorruptArtifactError if a state of a run is
    damaged."""
    folder = Path(path)
    if (folder / "run.json").is_file():
        return _state_of_run(RecordedRun.open(folder).paths, like, role or POLICY, step)
    if step is not None:
        raise RecipeError(f"`--step {step}` requires a run, and `{path}` is not a run", hint="leave out --step")
    if (manifest := manifests.read(folder)) is not None and manifest.stage.startswith("state/"):
        return _saved_state(run_of(folder), folder, like, role)
    _require_known(role, path)
    if is_torch_dist(folder):
        return _torch_dist(folder, like, role)
    _require_no_megatron(folder)
    if is_peft_folder(folder):
        raise RecipeError(
            f"`{path}` is a peft adapter; `convert-ckpt` reads adapters only from saved states",
            hint="merge it with peft (merge_and_unload, save_pretrained), or train from it: "
            f"--set actor.train.lora.start={quoted(path)}",
        )
    if like is not None:
        raise RecipeError(f"`--like` requires a Megatron folder, and `{path}` is not one", hint="leave out --like")
    folder = model_folder(path)
    if not (folder / "config.json").is_file():
        raise EnvironmentProblemError(
            f"`{path}` is not a run, a Megatron folder or a Hugging Face folder", hint=f"ls -a {quoted(folder)}"
        )
    return FoundCheckpoint(
        "hf", folder, folder, role or role_with(_head_of_config(folder)), f"Hugging Face folder {folder}"
    )


def _state_of_run(paths: RunPaths, like: str | None, role: str, step: int | None) -> FoundCheckpoint:
    roles = sorted({saved for saved, _ in paths.saved_states()})
    if roles and role not in roles:
        raise RecipeError(
            f"run `{paths.root}` has no saved state of role `{role}`; roles with saved states: {', '.join(roles)}",
            hint=f"ppoctl convert-ckpt {quoted(paths.root)} trained --to hf --role {quoted(roles[0])}",
        )
    steps = paths.saved_steps(role)
    if not steps:
        raise RecipeError(
            f"run `{paths.root}` has no saved state of the {role} yet", hint=f"ppoctl status {quoted(paths.root)}"
        )
    selected = steps[-1] if step is None else step
    if selected not in steps:
        saved = ", ".join(map(str, steps))
        of_role = "" if role == POLICY else f" --role {role}"
        raise RecipeError(
            f"run `{paths.root}` has no saved state of the {role} at step {selected}; saved steps: {saved}",
            hint=f"ppoctl convert-ckpt {quoted(paths.root)} trained --to hf{of_role} --step {steps[-1]}",
        )
    return _saved_state(paths, paths.state(role, selected), like, role)


def _saved_state(paths: RunPaths, folder: Path, like: str | None, role: str | None) -> FoundCheckpoint:
    manifest = manifests.read(folder)
    assert manifest is not None
    saved = manifest.stage.removeprefix("state/")
    _require_role(saved, role, folder)
    manifests.verify(folder, manifest)
    if like is None and (frozen := read_frozen_base(folder)) is not None:
        completing_folder(folder, frozen)  # its error names the option
    base = model_folder(like) if like is not None else _base(paths, saved)
    health = "a health rule stopped the run at this state: its last step was not healthy"
    notes = () if manifest.extra.get("healthy", True) else (health,)
    return FoundCheckpoint(
        "megatron",
        folder,
        base,
        saved,
        f"{saved} of `{paths.root}` at step {manifest.step}",
        notes,
        completed_by=None if like is None else base,
    )


def _base(paths: RunPaths, role: str) -> Path:
    if not paths.recipe_toml.is_file():
        raise RecipeError(
            f"the state is not in a run directory: `{paths.recipe_toml}` does not exist",
            hint="name a folder with config and tokenizer of the same model: --like FOLDER",
        )
    run = RecordedRun(paths)
    return same_companions(run, recipe_of(run), role, otherwise=", or name a folder that has it: --like FOLDER")


def _torch_dist(folder: Path, like: str | None, role: str | None) -> FoundCheckpoint:
    if like is None and not (folder / "config.json").is_file():
        raise RecipeError(
            f"`{folder}` has no config.json, so its model is unknown",
            hint=f"ppoctl convert-ckpt {quoted(folder)} trained --to hf --like FOLDER  # a folder of the same model",
        )
    output = TorchDist(folder).tensors.get("output_layer.weight")
    saved = role_with("value" if output is not None and output.size[0] == 1 else "token")
    _require_role(saved, role, folder)
    base = folder if like is None else model_folder(like)
    completed_by = None if like is None else base
    return FoundCheckpoint("megatron", folder, base, saved, f"Megatron folder {folder}", completed_by=completed_by)


def _require_role(saved: str, requested: str | None, folder: Path) -> None:
    if requested not in (None, saved):
        raise RecipeError(f"`{folder}` contains the {saved}, not the {requested}", hint="leave out --role")


def _require_known(role: str | None, path: str) -> None:
    """Raise unless a checkpoint outside a run can have this role."""
    if role is not None and role_with(head_of(role)) != role:
        known = " or ".join(map(role_with, get_args(Head)))
        raise RecipeError(
            f"`--role {role}` requires a run with this role, and `{path}` is not a run; its role can be {known}",
            hint="leave out --role",
        )


def _require_no_megatron(folder: Path) -> None:
    """Raise if the folder looks like a Megatron folder that cannot be read."""
    inside = list(_iterations(folder))
    if inside:
        raise RecipeError(
            f"`{folder}` contains several checkpoints",
            hint=f"name one of them: {', '.join(str(path) for path in inside[-3:])}",
        )
    if (folder / BACKEND).is_file():
        message = f"`{folder}` has `{BACKEND}` but no `.metadata`"
        raise EnvironmentProblemError(message, hint=f"ls -la {quoted(folder)}")


def _iterations(folder: Path) -> Iterator[Path]:
    """Yield the folders of Megatron-LM's checkpoints, such as `iter_0000100`."""
    return (path for path in sorted(folder.glob("iter_*")) if is_torch_dist(path))


def _head_of_config(folder: Path) -> Head:
    """Return the head of a model according to its configuration: a value head has a class of its own."""
    names = " ".join(read_config(folder).get("architectures") or ())
    return "value" if "ForSequenceClassification" in names or "ForTokenClassification" in names else "token"
