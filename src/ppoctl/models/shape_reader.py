"""Reader of configurations, config.json -> `ModelShape`. No other code interprets config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, PpoctlError, RecipeError
from ppoctl.models.bundled_configs import carried_folder
from ppoctl.models.config import NOT_OF_THE_MODEL, InvalidFieldError, completed
from ppoctl.models.families import FAMILIES
from ppoctl.models.folder import local_folder, read_config
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_fields import Family, UnsupportedValueError


def shape_if_known(path: str) -> ModelShape | None:
    """Return the shape of the model at a path of a recipe, from its config.json or the bundled config.json. Return
    None if neither exists, or if the model cannot be trained, which `preflight` reports."""
    folder = local_folder(path) or carried_folder(path)
    try:
        return None if folder is None else read_shape(folder)
    except PpoctlError:
        return None


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the model that `config.json` in `folder` describes.

    Raises EnvironmentProblemError if the file does not exist or cannot be read, and RecipeError that names the field
    if ppoctl does not support its value.
    """
    if not (folder / "config.json").is_file():
        raise EnvironmentProblemError(f"no `config.json` in model folder `{folder}`", hint="check `model.path`")
    written = read_config(folder)
    kind = written.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise RecipeError(
            f"model family `{kind}` is not supported{_known_reason(written)} (config.json of `{folder}`)",
            hint=f"choose a model of one of these families: {', '.join(sorted(FAMILIES))}",
        )
    try:
        config = completed(written, family)
    except InvalidFieldError as error:
        raise EnvironmentProblemError(f"config.json of `{folder}`: {error}", hint="fetch the model again") from error
    return shape_of(config, folder)


def _known_reason(written: Mapping[str, Any]) -> str:
    """Return why ppoctl does not train a model of an unknown family, if a field of its configuration shows it."""
    if "text_config" in written:
        return ": it has `text_config`, and only models of text are trained"
    if "linear_key_head_dim" in written:  # a gated delta net: Qwen3-Next, Qwen3.5
        return ": it has linear attention, whose state the trainer does not reset between packed sequences"
    return ""


def shape_of(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """Return the shape of the model that a completed configuration of a known family describes. Raises RecipeError,
    like `read_shape`."""
    family = FAMILIES[config["model_type"]]
    _refuse_unsupported(config, family, folder)
    values = {}
    for name, source in family.reads.items():
        try:
            values[name] = source(config)
        except UnsupportedValueError as supported:
            fields = ", ".join(f"`{field} = {config.get(field)}`" for field in dict.fromkeys(source.fields))
            raise _refusal(fields, config, folder, str(supported)) from supported
    return ModelShape(family=config["model_type"], **values, **family.constants)


def _refuse_unsupported(config: Mapping[str, Any], family: Family, folder: Path) -> None:
    known = family.fields_read | family.ignores | NOT_OF_THE_MODEL
    required = [field for field in family.requires if field in config]  # a switch precedes the fields that it enables
    for field in dict.fromkeys((*required, *config)):
        value = config[field]
        supported = family.requires[field](value) if field in family.requires else field in known
        if not supported:
            hint = "choose another model; editing this field would change what the model computes"
            raise _refusal(f"`{field} = {value}`", config, folder, hint)


def _refusal(fields: str, config: Mapping[str, Any], folder: Path, hint: str) -> RecipeError:
    return RecipeError(
        f"{fields} is not supported for `{config['model_type']}` (config.json of `{folder}`)", hint=hint
    )
