"""Where a model comes from: its folder, and what the configuration in it says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppoctl.convert.config import OF_EVERY_MODEL, InvalidFieldError, completed
from ppoctl.convert.families import FAMILIES
from ppoctl.convert.families.family import Family
from ppoctl.convert.fields import UnsupportedValueError
from ppoctl.convert.headers import SAFETENSORS, has_weights
from ppoctl.convert.shape import ModelShape
from ppoctl.errors import EnvironmentProblemError, RecipeError
from ppoctl.recipe.assets import local_folder, read_config, read_json_object


def model_folder(path: str, *, allow_pickle: bool = False) -> Path:
    """The folder with the model's files: `path` itself, or the local snapshot of a hub id (fetched where there is
    none yet; with `allow_pickle` its pytorch_model.bin too).

    Raises EnvironmentProblemError when there is neither.
    """
    found = local_folder(path)
    if found is not None and (Path(path).is_dir() or has_weights(found, SAFETENSORS)):
        return found
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise EnvironmentProblemError(f"model folder `{path}` does not exist", hint="check `model.path`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model", *["*.bin"] * allow_pickle]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise EnvironmentProblemError(
            f"model `{path}` is neither a folder nor available from the hub: {error}", hint=f"hf download {path}"
        ) from error


def read_shape(folder: Path) -> ModelShape:
    """The model that `config.json` in `folder` describes.

    Raises EnvironmentProblemError when there is no such file or it cannot be read, RecipeError naming the field when
    it asks for something this trainer does not compute.
    """
    if not (folder / "config.json").is_file():
        raise EnvironmentProblemError(f"no `config.json` in model folder `{folder}`", hint="check `model.path`")
    written = read_config(folder)
    kind = written.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise RecipeError(
            f"model family `{kind}` is not supported (config.json of `{folder}`)",
            hint=f"choose a model of {', '.join(sorted(FAMILIES))}",
        )
    try:
        config = completed(written, family)
    except InvalidFieldError as error:
        raise EnvironmentProblemError(f"config.json of `{folder}`: {error}", hint="fetch the model again") from error
    return shape_of(config, folder)


def shape_of(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """The model of a completed configuration of a known family. Raises RecipeError as `read_shape`."""
    family = FAMILIES[config["model_type"]]
    _refuse_unsupported(config, family, folder)
    found = {}
    for name, source in family.reads.items():
        try:
            found[name] = source(config)
        except UnsupportedValueError as supported:
            said = ", ".join(f"`{field} = {config.get(field)}`" for field in dict.fromkeys(source.fields))
            raise _refusal(said, config, folder, str(supported)) from supported
    return ModelShape(family=config["model_type"], **found, **family.constants)


def _refuse_unsupported(config: Mapping[str, Any], family: Family, folder: Path) -> None:
    known = family.fields_read | family.ignores | OF_EVERY_MODEL
    required = [field for field in family.requires if field in config]  # switches before what they turn on
    for field in dict.fromkeys((*required, *config)):
        value = config[field]
        supported = family.requires[field](value) if field in family.requires else field in known
        if not supported:
            hint = "choose another model; a copy with this field edited would be another model"
            raise _refusal(f"`{field} = {value}`", config, folder, hint)


def _refusal(said: str, config: Mapping[str, Any], folder: Path, hint: str) -> RecipeError:
    return RecipeError(f"{said} is not supported for `{config['model_type']}` (config.json of `{folder}`)", hint=hint)


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a response: the generation config's, else the model config's. Raises EnvironmentProblemError
    where neither names one."""
    for name in ("generation_config.json", "config.json"):
        found = read_json_object(folder / name).get("eos_token_id")
        if found is None:
            continue
        ids = tuple(found) if isinstance(found, list) else (found,)
        if not ids or not all(isinstance(each, int) for each in ids):
            raise EnvironmentProblemError(
                f"`eos_token_id = {found}` in `{folder / name}` is no token", hint="fetch the model again"
            )
        return ids
    raise EnvironmentProblemError(
        f"model folder `{folder}` names no end-of-sequence token: responses would never end",
        hint="add `eos_token_id` to its generation_config.json",
    )
