"""The layers of a recipe, weakest first: the site's file, files from left to right, environment, `--set`.

    slurm.toml  a.toml  b.toml  PPOCTL_ACTOR__OPTIMIZER__LR=1e-6  --set steps=40
         |         |       |                |                          |
         +---------+-------+----------- deep merge --------------------+--> one dict, and for each value its layer

Each layer is a source of pydantic-settings, which reads the files and the variables, calls the sources from the
strongest to the weakest (`WrittenRecipe` gives the order), and merges them; the defaults of a table that was written
are the weakest. A layer adds what pydantic-settings does not have: where it sets each value, and what stronger layers
leave of it. The value of a variable is read as that of `--set` is: a table among them is the whole value of its key,
and of the weaker layers only the defaults have a say in it. A table whose alternative (`kind`, `place`, `format`) a
stronger layer changes is dropped whole from the weaker ones. Relative paths become absolute (`paths`). Nothing here
judges values, but for the site's file: it may say nothing that changes a result.
"""

import re
import tomllib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from ppoctl.errors import MissingAssetError
from ppoctl.loading.problems import Problem
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import DEFAULT, KeyPath, dotted, lines_of, paths_in
from ppoctl.recipe.paths import PathResolver, is_written, matching
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe_table import Effect

ROOT = tree.of(Recipe)
PREFIX = "PPOCTL_"
NESTED = "__"
SITE = "PPOCTL_SITE"
NO_KEYS = {
    "PPOCTL_JOB": "job that the batch script of a run began; set by it",
    "PPOCTL_DATA": "folder of data sets, where recipes and tests look for real rows",
    "PPOCTL_RAY_FOLDER": "private folder of a node's Ray, by which its processes are known",
    SITE: "the site's file, read below every recipe; empty: none",
}
"""Our variables that set no key of a recipe, with their meaning."""
BY_ONE_KEY: dict[KeyPath, str] = {("model", "critic"): "path", ("eval", "metrics"): "function"}
"""Paths of the tables that may be written as the value of one of their keys (`schema.PathOrTable`), with that key."""
LENGTHS = {"steps", "epochs"}
"""Keys that say how long a run is: a layer that writes one of them writes none of the other's."""
COMPLETE = "parallel"
"""Name of the tables that say all there is to say (`ParallelTable`): writing one sets its other keys to 1 or off."""
_NAMED = re.compile(r"\$\{?(\w+)")


@dataclass
class Layers:
    """The layers to compose, and what was found out while they were read."""

    files: tuple[Path, ...]
    sets: tuple[str, ...]
    environ: Mapping[str, str]
    site: Path | None = None
    """The site's file, which is there; None: there is none."""
    problems: list[Problem] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    """All layers merged: the data that the recipe is validated from."""
    sources: list["Layer"] = field(default_factory=list)
    """The layers that were read, strongest first."""
    replaced: set[KeyPath] = field(default_factory=set)
    """Paths of alternatives that a stronger layer changed and of tables that it wrote whole; weaker layers have no
    say there."""

    counts_epochs: bool = False
    """Whether `steps` was counted from `epochs` (see `run_length`)."""

    def read(self) -> None:
        """Read and merge all layers; what is wrong with one of them is added to `problems`."""
        merged = _OF_KEYS(layers=self)
        self.written = {name: value for name, value in merged if name in merged.model_fields_set}

    def place(self, path: KeyPath) -> str:
        """Where the value at this path was set; for a table, where the strongest layer that has it writes it."""
        path = (*path[:-1], "function") if path[-1:] == ("digest",) else path
        path = ("epochs",) if path == ("steps",) and self.counts_epochs else path
        for source in self.sources:
            if is_written(source.kept, path):
                return source.place(path)
        return DEFAULT


class WrittenRecipe(BaseSettings):
    """A recipe as its layers write it together. Its values are of any type: `Recipe` validates them afterwards."""

    model_config = SettingsConfigDict(
        extra="allow", case_sensitive=True, env_prefix=PREFIX, env_nested_delimiter=NESTED, enable_decoding=False
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The layers, strongest first."""
        assert isinstance(init_settings, InitSettingsSource)
        layers: Layers = init_settings.init_kwargs["layers"]
        sets = SetLayer(settings_cls, layers)
        files = [FileLayer(settings_cls, layers, file) for file in reversed(layers.files)]
        if layers.site is not None:
            files.append(FileLayer(settings_cls, layers, layers.site))
            layers.problems += _changing_results(files[-1])
        variables = _of_environment(layers.environ, ())
        values = [*(file.toml_data for file in files), *(value for _, value, _ in (*sets.settings, *variables))]
        named = {name for each in values for name in _named_in(each)}
        environment = EnvironmentLayer(settings_cls, layers, _of_environment(layers.environ, named))
        return sets, environment, *files, WrittenDefaults(settings_cls)


_ANY: dict[str, Any] = dict.fromkeys(ROOT.keys, (Any, None))
_OF_KEYS = create_model("WrittenRecipe", __base__=WrittenRecipe, **_ANY)
"""The class with a field for each key at the top of a recipe."""


class Layer(PydanticBaseSettingsSource):
    """A source of a recipe's values that knows where it sets each of them."""

    layers: Layers
    kept: dict[str, Any]
    """What the layer contributes below the stronger ones."""
    base: Path = Path()
    """Folder at which the layer's relative paths start."""

    @abstractmethod
    def place(self, path: KeyPath) -> str:
        """Where the layer sets the value at a path."""

    def compose(self, data: dict[str, Any], whole: Sequence[KeyPath]) -> dict[str, Any]:
        """What stronger layers leave of this layer's data, with absolute paths. The `whole` tables replace those of
        weaker layers instead of being merged with them."""
        layers, stronger = self.layers, self.current_state
        kept: dict[str, Any] = _without_replaced(ROOT, data, stronger, layers.replaced)
        if LENGTHS & stronger.keys():
            kept = {name: value for name, value in kept.items() if name not in LENGTHS}
        elif kept.keys() >= LENGTHS:
            says = "`steps` and `epochs` are both written, and each says how long the run is"
            layers.problems.append(Problem(self.place(("epochs",)), says, "remove one of the two"))
            del kept["epochs"]
        # Only now: a table that the layer writes whole hides those of weaker layers, and not its own.
        layers.replaced.update(whole)
        for pattern, key in BY_ONE_KEY.items():
            for path, table in matching(kept, pattern):
                if isinstance(table[path[-1]], str):
                    table[path[-1]] = {key: table[path[-1]]}
        PathResolver(self.base, layers.environ, self._add_missing).resolve(kept, stronger)
        self.kept = kept
        layers.sources.append(self)
        return kept

    def _add_missing(self, path: KeyPath, error: MissingAssetError) -> None:
        self.layers.problems.append(Problem(self.place(path), error.message, error.hint, MissingAssetError))


class FileLayer(Layer, TomlConfigSettingsSource):
    """One TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers, file: Path) -> None:
        super().__init__(settings_cls, file)
        self.layers, self.file, self.base, self.lines = layers, file, file.parent, lines_of(_text_of(file))

    def __call__(self) -> dict[str, Any]:
        return self.compose(super().__call__(), [path for path in self.lines if path[-1] == COMPLETE])

    def place(self, path: KeyPath) -> str:
        # A value inside an array stands where its array stands when it has no line of its own.
        known = (path[:length] for length in range(len(path), 0, -1) if path[:length] in self.lines)
        return next((f"{self.file}:{self.lines[key]}" for key in known), str(self.file))

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        return tomllib.loads(_text_of(file_path))


def _text_of(file: Path) -> str:
    return file.read_text("utf-8-sig")  # a byte order mark is no part of it


Setting = tuple[KeyPath, Any, str]
"""A dotted key, its value, and where the two were given."""


class SettingLayer(Layer):
    """Values that were each given by a dotted key, later ones over earlier ones."""

    settings: Sequence[Setting]

    def place(self, path: KeyPath) -> str:
        inside = [where for given, _, where in self.settings if given[: len(path)] == path]
        around = [where for given, _, where in self.settings if given == path[: len(given)]]
        return [*inside, *around][-1]

    @property
    def tables(self) -> list[KeyPath]:
        """Keys whose value is a table."""
        return [path for path, value, _ in self.settings if isinstance(value, dict)]


class EnvironmentLayer(SettingLayer, EnvSettingsSource):
    """Variables like `PPOCTL_ACTOR__OPTIMIZER__LR`."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers, settings: Sequence[Setting]) -> None:
        super().__init__(settings_cls, case_sensitive=False)
        self.layers, self.settings = layers, settings
        typed: dict[str, Any] = {f"{PREFIX}{NESTED.join(path)}".lower(): value for path, value, _ in settings}
        self.env_vars = typed

    def __call__(self) -> dict[str, Any]:
        data = super().__call__()
        for path, value, _ in self.settings:
            if path[0] not in ROOT.keys:
                _put(data, path, value)  # an unknown key, which validation reports
        return self.compose(data, self.tables)

    def field_is_complex(self, field: FieldInfo) -> bool:  # noqa: ARG002
        """Whether variables may set keys inside this one; any may, as the class has no types."""
        return True


class SetLayer(SettingLayer, InitSettingsSource):
    """The `--set` options of the command line."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers) -> None:
        self.layers, self.settings = layers, _of_sets(layers.sets, layers.problems)
        data: dict[str, Any] = {}
        for path, value, _ in self.settings:
            _put(data, path, value)
        super().__init__(settings_cls, data)

    def __call__(self) -> dict[str, Any]:
        return self.compose(super().__call__(), self.tables)


class WrittenDefaults(PydanticBaseSettingsSource):
    """Defaults of the tables that were written: `--set health.kl.action=stop` leaves the bound of that rule at its
    default, and so does a table that is written whole."""

    def __call__(self) -> dict[str, Any]:
        defaults = tree.defaults_beside(ROOT, self.current_state)
        kept: dict[str, Any] = _without_replaced(ROOT, defaults, self.current_state, set())
        return kept

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Not called: the source returns all its values at once."""
        return None, "", False


def site_file(environ: Mapping[str, str]) -> Path | None:
    """The file with what a site wants of every run: the one that `PPOCTL_SITE` names, else `ppoctl/slurm.toml` in the
    user's folder of settings if it is there. None: there is none; without a home in `environ` nobody looks."""
    if SITE in environ:
        return Path(environ[SITE]).expanduser() if environ[SITE] else None
    home = environ.get("HOME")
    settings = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    file = Path(settings, "ppoctl", "slurm.toml") if settings else None
    return file if file is not None and file.is_file() else None


def _changing_results(site: FileLayer) -> Iterator[Problem]:
    """A problem for each key of the site's file that changes results: one recipe would be another one elsewhere."""
    for path in paths_in(site.toml_data):
        if any(key.effect is Effect.RESULTS for key in tree.keys_at(ROOT, path)):
            says = f"`{dotted(path)}` changes results, and a site's file may not: the recipe alone says what a run is"
            yield Problem(site.place(path), says, "move the line into the recipe")


def _of_environment(environ: Mapping[str, str], named: Collection[str]) -> list[Setting]:
    """Settings of `PPOCTL_ACTOR__OPTIMIZER__LR` and the like: of every variable with our prefix, so that a misspelt
    one is an unknown key, but for those that a value of the recipe has `named`."""
    names = [name for name in environ if name.upper().startswith(PREFIX) and name not in (*NO_KEYS, *named)]
    return [
        _setting(tuple(name.lower().removeprefix(PREFIX.lower()).split(NESTED)), environ[name], f"environment {name}")
        for name in sorted(names, key=lambda name: name.count(NESTED))  # a table before what is inside it
    ]


def _of_sets(sets: Sequence[str], problems: list[Problem]) -> list[Setting]:
    """Settings of `--set a.b=1`, in order."""
    found: list[Setting] = []
    for text in sets:
        key, equals, value = text.partition("=")
        path = path_of(key)
        if path and equals:
            found.append(_setting(path, value, "--set"))
        else:
            says = f"`{text}` is not KEY=VALUE with a dotted key"
            problems.append(Problem("--set", says, "write it as `--set actor.optimizer.lr=1e-6`"))
    return found


def _setting(path: KeyPath, text: str, where: str) -> Setting:
    value = _typed(text, path)
    if path in BY_ONE_KEY and isinstance(value, str):
        path = (*path, BY_ONE_KEY[path])  # other settings may be of keys beside it
    return path, value, where


def _typed(text: str, path: KeyPath) -> Any:
    """The value of a setting: TOML, or a bare word, which is text; where the key is a text, it needs no quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    keys = tree.keys_at(ROOT, path)
    is_text = any(isinstance(key.node, tree.Leaf) and key.node.annotation is str for key in keys)
    if len(document) != 1 or (is_text and not isinstance(document["value"], str)):
        return text
    return document["value"]


def _named_in(value: Any) -> Iterator[str]:
    """Names of the variables in a text, and in all texts of a table or an array."""
    if isinstance(value, str):
        yield from _NAMED.findall(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _named_in(inner)


def path_of(key: str) -> KeyPath:
    """The parts of a dotted key as TOML reads it; none where it is no key."""
    try:
        document = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    paths = list(paths_in(document))  # none: all of it is a comment
    return paths[-1] if paths and "\n" not in key else ()


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = data.get(name)
        data[name] = data = inner if isinstance(inner, dict) else {}
    data[path[-1]] = value


def _without_replaced(
    here: tree.Node | None, data: Any, stronger: Any, replaced: set[KeyPath], path: KeyPath = ()
) -> Any:
    """A copy of a weaker layer's data without the tables that a stronger layer has replaced, or whose alternative it
    changed."""
    if not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {}
    for name, value in data.items():
        inner = tree.at(here, (name,), data) if here is not None else None
        above = stronger.get(name) if isinstance(stronger, Mapping) else None
        if isinstance(inner, tree.Choice) and isinstance(value, dict) and isinstance(above, Mapping):
            mine, theirs = inner.chosen(value) or inner.usual, inner.chosen(above)
            if mine and theirs and mine != theirs:
                replaced.add((*path, name))
        if (*path, name) not in replaced:
            kept[name] = _without_replaced(inner, value, above, replaced, (*path, name))
    return kept
