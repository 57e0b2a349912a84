"""The sources of a recipe, weakest first: files from left to right, environment, `--set`.

    a.toml  b.toml  PPOCTL_ACTOR__OPTIMIZER__LR=1e-6  --set steps=40
       |       |                |                          |
       +-------+--- deep merge, pydantic-settings ---------+--> one dict, and for each value the layer it came from

pydantic-settings asks the strongest source first and merges the weaker ones below it; the defaults of a table that
was written are the weakest. Two things are added here: a table whose alternative (`kind`, `place`, `format`) a
stronger layer changes is dropped whole from the weaker ones, and relative paths become absolute: in the layer that
wrote them, or where the command was typed where they begin with an environment variable. Nothing here judges values.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from ppoctl.errors import MissingAssetError
from ppoctl.model.folder import is_hub_id
from ppoctl.recipe import origins, shape
from ppoctl.recipe.problems import Problem
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.variables import NESTED, PREFIX, sets_a_key

MODELS = (("model", "path"), ("model", "critic"))
"""Keys that name a folder or a hub id."""
PATHS = (*MODELS, ("data", "train", "path"), ("data", "eval", shape.ANY_NAME, "path"))
COMPLETE = (("actor", "parallel"), ("critic", "parallel"))
"""Tables that say all there is to say (`ParallelTable`): to write one is to write its other keys as 1 or off."""
VARIABLE = re.compile(r"\$(\w+)(?=/|$)|\$\{(\w+)\}(?=/|$)")


@dataclass
class Layers:
    """What to compose, and what the sources found out while they were read."""

    files: tuple[FilePath, ...]
    sets: tuple[str, ...]
    environ: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    """All layers merged: what the recipe is validated from."""
    sources: list["Layer"] = field(default_factory=list)
    """Strongest first."""
    variables: set[str] = field(default_factory=set)
    """Environment variables that paths of the recipe begin with."""
    replaced: set[shape.Path] = field(default_factory=set)
    """Alternatives that a stronger layer changed, tables that it wrote whole; weaker layers have no say there."""

    def place(self, path: shape.Path) -> str:
        """Where the value at this path was set; for a table, where the strongest layer that has it writes it."""
        for source in self.sources:
            if _has(source.kept, path):
                return source.place(path)
        return origins.DEFAULT


class Layer(PydanticBaseSettingsSource):
    """One source. `kept` is what it contributes after composition."""

    kept: dict[str, Any]
    base: FilePath
    """Folder at which its relative paths start."""

    def place(self, path: shape.Path) -> str:
        """Where this layer sets the path."""
        raise NotImplementedError

    def compose(self, layers: Layers, data: dict[str, Any], whole: Iterable[shape.Path] = ()) -> dict[str, Any]:
        """What is left of this layer's data below the stronger ones, with absolute paths. The `whole` tables replace
        those of weaker layers."""
        kept: dict[str, Any] = _without_replaced(shape.of(Recipe), data, self.current_state, layers.replaced)
        self.kept = kept
        layers.sources.append(self)
        layers.replaced.update(whole)
        for pattern in PATHS:
            for path, table in _matching(kept, pattern):
                if isinstance(table[path[-1]], str):
                    self._resolve(layers, path, table)
        return kept

    def _resolve(self, layers: Layers, path: shape.Path, table: dict[str, Any]) -> None:
        text = table[path[-1]]
        variable, base = VARIABLE.match(text), self.base
        if variable is not None:
            name = variable[1] or variable[2]
            layers.variables.add(name)
            base = FilePath.cwd()  # where somebody typed it
            if not layers.environ.get(name):
                says = f"`{origins.dotted(path)}` is `{text}`, and the environment has no `{name}`"
                hint = f"export {name}=/path/to/folder"
                layers.problems.append(Problem(self.place(path), says, hint, MissingAssetError))
                return
            text = layers.environ[name] + text[variable.end() :]
        folder = (base / FilePath(text).expanduser()).absolute()
        if path in MODELS and is_hub_id(text) and not (base / text.split("/")[0]).exists():
            table[path[-1]] = text
        else:
            # Without `..`, and without following links: a run keeps the name a person gave.
            table[path[-1]] = os.path.normpath(folder)


class FileLayer(Layer, TomlConfigSettingsSource):
    """One TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers, path: FilePath) -> None:
        self._layers, self._path, self.base = layers, path, path.parent
        self._lines = origins.lines_of(path.read_text("utf-8"))
        super().__init__(settings_cls, toml_file=path)

    def __call__(self) -> dict[str, Any]:
        data = super().__call__()
        return self.compose(self._layers, data, (path for path in _tables(data) if path in COMPLETE))

    def place(self, path: shape.Path) -> str:
        """`file:line`; a value inside an array stands where its array stands when it has no line of its own."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return f"{self._path}:{self._lines[path[:length]]}"
        return str(self._path)


class EnvironmentLayer(Layer, EnvSettingsSource):
    """`PPOCTL_ACTOR__OPTIMIZER__LR`. A whole table has no variable (so that `PPOCTL_DATA` may name a folder)."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers) -> None:
        super().__init__(settings_cls, case_sensitive=False, env_prefix=PREFIX, env_nested_delimiter=NESTED)
        self._layers, self.base = layers, FilePath.cwd()
        self._names = {name.lower(): name for name in layers.environ if sets_a_key(name)}
        self.env_vars = {lower: layers.environ[name] for lower, name in self._names.items()}

    def __call__(self) -> dict[str, Any]:
        try:
            data = super().__call__()
        except SettingsError:
            self._drop_unreadable()
            data = super().__call__()
        for lower, name in self._names.items():
            first, *rest = lower.removeprefix(PREFIX.lower()).split(NESTED)
            if first not in self.settings_cls.model_fields:
                _put(data, (first, *rest), self._layers.environ[name])
        return self.compose(self._layers, data)

    def _drop_unreadable(self) -> None:
        """Report the variables that hold broken JSON, and read the others."""
        complete = dict(self.env_vars)
        for lower in complete:
            self.env_vars = {lower: complete[lower]}
            try:
                super().__call__()
            except SettingsError:
                del self._names[lower]
                says = f"`{complete[lower]}` is no JSON, and this key is an array or a table"
                self._layers.problems.append(Problem(f"environment {lower.upper()}", says))
        self.env_vars = {lower: complete[lower] for lower in self._names}

    def place(self, path: shape.Path) -> str:
        for length in range(len(path), 0, -1):
            lower = (PREFIX + NESTED.join(path[:length])).lower()
            if lower in self._names:
                return f"environment {self._names[lower]}"
        inside = (PREFIX + NESTED.join(path) + NESTED).lower()
        first = next((name for lower, name in self._names.items() if lower.startswith(inside)), None)
        return f"environment {first}" if first else "environment"


class SetLayer(Layer):
    """`--set a.b=1`, later ones over earlier ones."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers) -> None:
        super().__init__(settings_cls)
        self._layers, self.base = layers, FilePath.cwd()

    def __call__(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        whole: list[shape.Path] = []
        for text in self._layers.sets:
            parsed = parse_set(text)
            if parsed is None:
                says = f"`{text}` is not KEY=VALUE with a dotted key"
                self._layers.problems.append(Problem("--set", says, "write it as `--set actor.optimizer.lr=1e-6`"))
            else:
                _put(data, *parsed)
                tables = _tables(parsed[1], parsed[0])
                whole += (path for path, table in tables.items() if not table or path in COMPLETE)
        return self.compose(self._layers, data, whole)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Not asked: `__call__` hands over all values at once."""
        return None, "", False

    def place(self, path: shape.Path) -> str:  # noqa: ARG002
        return "--set"


class DefaultLayer(Layer):
    """What tables that were written keep of their defaults: `--set health.kl.action=stop` leaves its bound."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers) -> None:
        super().__init__(settings_cls)
        self._layers, self.base = layers, FilePath.cwd()

    def __call__(self) -> dict[str, Any]:
        return self.compose(self._layers, shape.defaults_beside(shape.of(Recipe), self.current_state))

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Not asked."""
        return None, "", False

    def place(self, path: shape.Path) -> str:  # noqa: ARG002
        return origins.DEFAULT


class Merged(PydanticBaseSettingsSource):
    """The last one asked: contributes nothing and keeps what the others merged to."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers) -> None:
        super().__init__(settings_cls)
        self._layers = layers

    def __call__(self) -> dict[str, Any]:
        self._layers.written = self.current_state
        return {}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Not asked."""
        return None, "", False


class LayeredRecipe(Recipe, BaseSettings):
    """A recipe read from its layers."""

    model_config = SettingsConfigDict(case_sensitive=True)

    @classmethod
    def read(cls, layers: Layers) -> "LayeredRecipe":
        """Ask every layer. Raises pydantic's ValidationError; `layers` then holds what was written."""
        make: Callable[..., LayeredRecipe] = cls  # a settings class takes more than its fields
        return make(layers=layers)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Strongest first. The layers travel in the constructor's arguments, which are no source themselves."""
        assert isinstance(init_settings, InitSettingsSource)
        layers: Layers = init_settings.init_kwargs["layers"]
        files = [FileLayer(settings_cls, layers, path) for path in reversed(layers.files)]
        stronger = SetLayer(settings_cls, layers), EnvironmentLayer(settings_cls, layers), *files
        return *stronger, DefaultLayer(settings_cls, layers), Merged(cls, layers)


def parse_set(text: str) -> tuple[shape.Path, Any] | None:
    """Path and value of `a.b=1`. The value is TOML, a bare word is a string; None when the key is no dotted key."""
    key, equals, value = text.partition("=")
    if not equals or "\n" in key:
        return None
    try:
        path = tuple(_only_path(tomllib.loads(f"{key} = 0")))
    except tomllib.TOMLDecodeError:
        return None
    try:
        document = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return path, value
    return path, document["value"] if len(document) == 1 else value


def _only_path(document: dict[str, Any]) -> Iterator[str]:
    here: Any = document
    while isinstance(here, dict):
        name = next(iter(here))
        yield name
        here = here[name]


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = data.get(name)
        data[name] = data = inner if isinstance(inner, dict) else {}
    data[path[-1]] = value


def _has(data: Any, path: shape.Path) -> bool:
    for name in path:
        if isinstance(data, list):
            return True
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def _tables(data: Any, path: shape.Path = ()) -> dict[shape.Path, dict[str, Any]]:
    """All tables in what stands at a path, itself included."""
    if not isinstance(data, dict):
        return {}
    inner = (_tables(value, (*path, name)) for name, value in data.items())
    return {path: data} | {place: table for found in inner for place, table in found.items()}


def _matching(data: Any, pattern: shape.Path, path: shape.Path = ()) -> Iterator[tuple[shape.Path, dict[str, Any]]]:
    """Every written key that fits the pattern, with the table it stands in."""
    if not isinstance(data, dict):
        return
    names = list(data) if pattern[0] == shape.ANY_NAME else [pattern[0]]
    for name in names:
        if name in data and len(pattern) == 1:
            yield (*path, name), data
        elif name in data:
            yield from _matching(data[name], pattern[1:], (*path, name))


def _without_replaced(
    here: shape.Shape | None, data: Any, stronger: Any, replaced: set[shape.Path], path: shape.Path = ()
) -> Any:
    """A copy of a weaker layer's data without the tables that a stronger layer has replaced, or whose alternative it
    changed."""
    if not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {}
    for name, value in data.items():
        inner = shape.at(here, (name,), data) if here is not None else None
        above = stronger.get(name) if isinstance(stronger, Mapping) else None
        if isinstance(inner, shape.Choice) and isinstance(value, dict) and isinstance(above, Mapping):
            mine, theirs = inner.chosen(value), inner.chosen(above)
            if mine and theirs and mine != theirs:
                replaced.add((*path, name))
        if (*path, name) not in replaced:
            kept[name] = _without_replaced(inner, value, above, replaced, (*path, name))
    return kept


def told_uri(uri: str | None) -> str | None:
    """What is told to MLflow. A variable is kept by name until here, so that what it holds is written nowhere. Raises
    MissingAssetError where it is not set."""
    variable = VARIABLE.match(uri or "")
    if uri is None or variable is None:
        return uri
    name = variable[1] or variable[2]
    if not os.environ.get(name):
        raise MissingAssetError(
            f"`tracking.uri` is `{uri}`, and the environment has no `{name}`", hint=f"export {name}=URI"
        )
    return os.environ[name] + uri[variable.end() :]
