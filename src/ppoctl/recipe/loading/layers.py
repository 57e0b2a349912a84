"""The layers of a recipe, weakest first: the site file, files from left to right, environment, `--set`.

    slurm.toml  a.toml  b.toml  PPOCTL_ACTOR__OPTIMIZER__LR=1e-6  --set steps=40
         |         |       |                |                          |
         +---------+-------+----------- deep merge --------------------+--> one dict, and the layer of each value

Each layer is a source of pydantic-settings, which reads the files and the variables, calls the sources from the
strongest to the weakest (`WrittenRecipe` defines the order), and merges them. The weakest source contains the
defaults of the tables that were written. A layer adds two things to pydantic-settings: the origin of each value, and
the part of its data that stronger layers do not replace.

- The value of a variable is parsed like the value of `--set`. If the value is a table, it is complete: weaker layers
  do not add keys to it, and its other keys have their defaults.
- If a stronger layer changes the alternative of a table (`kind`, `place`, `format`), the table is dropped from the
  weaker layers.
- Relative paths become absolute (`recipe.paths`).

Values are not checked in this module, with one exception: the site file must not set a key that changes results.
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

from ppoctl.core.errors import MissingAssetError
from ppoctl.core.finding import Finding, from_error, problem
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import Effect
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.origins import DEFAULT, lines_of, paths_in
from ppoctl.recipe.paths import BY_ONE_KEY, PathResolver, is_written, matching, with_file_of
from ppoctl.recipe.schema import Recipe

ROOT = tree.of(Recipe)
PREFIX = "PPOCTL_"
NESTED = "__"
SITE = "PPOCTL_SITE"
NO_KEYS = {
    "PPOCTL_JOB": "job that the batch script of a run started; set by the script",
    "PPOCTL_DATA": "folder of data sets, where recipes and tests look for real rows",
    "PPOCTL_RAY_FOLDER": "private folder of a node's Ray, which identifies its processes",
    SITE: "the site file, the weakest layer of every recipe; empty: none",
}
"""Variables of ppoctl that do not set a recipe key -> their meaning."""
LENGTHS = {"steps", "epochs"}
"""Keys that set the length of a run. A layer that sets one of them hides both in weaker layers."""
COMPLETE = "parallel"
"""Name of the tables that are always complete (`ParallelTable`): if such a table is written, its other keys are 1 or
off."""
_NAMED = re.compile(r"\$\{?(\w+)")


@dataclass
class Layers:
    """The layers to merge, and the result of reading them."""

    files: tuple[Path, ...]
    sets: tuple[str, ...]
    environ: Mapping[str, str]
    site: Path | None = None
    """The existing site file; None: there is no site file."""
    problems: list[Finding] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    """All layers merged: the data that the recipe is validated from."""
    sources: list["Layer"] = field(default_factory=list)
    """The layers that were read, strongest first."""
    replaced: set[KeyPath] = field(default_factory=set)
    """Paths of tables whose alternative a stronger layer changed, and of tables that a stronger layer wrote
    completely. Weaker layers do not contribute to these tables."""

    counts_epochs: bool = False
    """Whether `steps` was counted from `epochs` (see `run_length`)."""

    def read(self) -> None:
        """Read and merge all layers. Errors in a layer are added to `problems`."""
        merged = _OF_KEYS(layers=self)
        self.written = {name: value for name, value in merged if name in merged.model_fields_set}

    def place(self, path: KeyPath) -> str:
        """Return the origin of the value at a path; for a table, its origin in the strongest layer that has the
        table."""
        path = with_file_of(path)
        path = ("epochs",) if path == ("steps",) and self.counts_epochs else path
        for source in self.sources:
            if is_written(source.kept, path):
                return source.place(path)
        return DEFAULT


class WrittenRecipe(BaseSettings):
    """The merged values of all layers, of any type: `Recipe` validates them afterwards."""

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
        """Return the layers, strongest first."""
        assert isinstance(init_settings, InitSettingsSource)
        layers: Layers = init_settings.init_kwargs["layers"]
        sets = SetLayer(settings_cls, layers)
        files = [FileLayer(settings_cls, layers, file) for file in reversed(layers.files)]
        if layers.site is not None:
            files.append(FileLayer(settings_cls, layers, layers.site))
            layers.problems += _changing_results(files[-1])
        variables = _of_environment(layers.environ, ())
        values = [*(file.toml_data for file in files), *(value for _, value, _ in (*sets.settings, *variables))]
        named = {name for value in values for name in _named_in(value)}
        environment = EnvironmentLayer(settings_cls, layers, _of_environment(layers.environ, named))
        return sets, environment, *files, WrittenDefaults(settings_cls)


_ANY: dict[str, Any] = dict.fromkeys(ROOT.keys, (Any, None))
_OF_KEYS = create_model("WrittenRecipe", __base__=WrittenRecipe, **_ANY)
"""`WrittenRecipe` with a field for each key at the top of a recipe."""


class Layer(PydanticBaseSettingsSource):
    """A source of recipe values that records the origin of each value."""

    layers: Layers
    kept: dict[str, Any]
    """The part of the data of the layer that stronger layers do not replace."""
    base: Path = Path()
    """Folder that the relative paths of the layer start from."""

    @abstractmethod
    def place(self, path: KeyPath) -> str:
        """Return the origin of the value at a path."""

    def compose(self, data: dict[str, Any], whole: Sequence[KeyPath]) -> dict[str, Any]:
        """Return the data of this layer that stronger layers do not replace, with absolute paths.

        `whole`: paths of tables that replace the tables of weaker layers instead of being merged with them.
        """
        layers, stronger = self.layers, self.current_state
        kept: dict[str, Any] = _without_replaced(ROOT, data, stronger, layers.replaced)
        if LENGTHS & stronger.keys():
            kept = {name: value for name, value in kept.items() if name not in LENGTHS}
        elif kept.keys() >= LENGTHS:
            message = "`steps` and `epochs` are both set, and each sets the length of the run"
            layers.problems.append(problem(message, self.place(("epochs",)), "remove one of the two"))
            del kept["epochs"]
        # This line must follow the computation of `kept`: a complete table hides the tables of weaker layers, but not
        # the table of this layer.
        layers.replaced.update(whole)
        for pattern, key in BY_ONE_KEY.items():
            for path, table in matching(kept, pattern):
                if isinstance(table[path[-1]], str):
                    table[path[-1]] = {key: table[path[-1]]}
        folders = tuple(file.parent for file in layers.files)
        PathResolver(self.base, layers.environ, self._add_missing, folders).resolve(kept, stronger)
        self.kept = kept
        layers.sources.append(self)
        return kept

    def _add_missing(self, path: KeyPath, error: MissingAssetError) -> None:
        self.layers.problems.append(from_error(error, self.place(path), kind="recipe"))


class FileLayer(Layer, TomlConfigSettingsSource):
    """One TOML file."""

    def __init__(self, settings_cls: type[BaseSettings], layers: Layers, file: Path) -> None:
        super().__init__(settings_cls, file)
        self.layers, self.file, self.base, self.lines = layers, file, file.parent, lines_of(_text_of(file))

    def __call__(self) -> dict[str, Any]:
        return self.compose(super().__call__(), [path for path in self.lines if path[-1] == COMPLETE])

    def place(self, path: KeyPath) -> str:
        # A value inside an array has the line of the array if it does not have a separate line.
        known = (path[:length] for length in range(len(path), 0, -1) if path[:length] in self.lines)
        return next((f"{self.file}:{self.lines[key]}" for key in known), str(self.file))

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        return tomllib.loads(_text_of(file_path))


def _text_of(file: Path) -> str:
    return file.read_text("utf-8-sig")  # utf-8-sig drops a byte order mark


Setting = tuple[KeyPath, Any, str]
"""A dotted key, its value, and their origin."""


class SettingLayer(Layer):
    """Values that are set by dotted keys; later settings override earlier ones."""

    settings: Sequence[Setting]

    def place(self, path: KeyPath) -> str:
        inside = [where for key, _, where in self.settings if key[: len(path)] == path]
        around = [where for key, _, where in self.settings if key == path[: len(key)]]
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
        """Return whether variables may set keys inside this key: always, because the class has no types."""
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
    """Defaults of the other keys of each written table: after `--set health.kl.action=stop`, the bound of the rule
    `health.kl` still has its default. This also applies to a table that is written as one value."""

    def __call__(self) -> dict[str, Any]:
        defaults = tree.defaults_beside(ROOT, self.current_state)
        kept: dict[str, Any] = _without_replaced(ROOT, defaults, self.current_state, set())
        return kept

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """Not called: the source returns all its values at once."""
        return None, "", False


def site_file(environ: Mapping[str, str]) -> Path | None:
    """Return the site file: `PPOCTL_SITE` if it is set, otherwise `ppoctl/slurm.toml` in the user's config folder.

    Returns None if the file does not exist, or if `environ` has neither `HOME` nor `XDG_CONFIG_HOME`.
    """
    if SITE in environ:
        return Path(environ[SITE]).expanduser() if environ[SITE] else None
    home = environ.get("HOME")
    settings = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    file = Path(settings, "ppoctl", "slurm.toml") if settings else None
    return file if file is not None and file.is_file() else None


def _changing_results(site: FileLayer) -> Iterator[Finding]:
    """Yield a problem for each key of the site file that changes results; only a recipe may set such keys."""
    for path in paths_in(site.toml_data):
        if any(key.effect is Effect.RESULTS for key in tree.keys_at(ROOT, path)):
            message = f"`{dotted(path)}` changes results, which a site file must not: only the recipe defines a run"
            yield problem(message, site.place(path), "move the line into the recipe")


def _of_environment(environ: Mapping[str, str], named: Collection[str]) -> list[Setting]:
    """Return the settings of variables such as `PPOCTL_ACTOR__OPTIMIZER__LR`.

    Every variable with the prefix is read, so that a misspelled name is reported as an unknown key. Variables in
    `named` are skipped: values of the recipe refer to them.
    """
    names = [name for name in environ if name.upper().startswith(PREFIX) and name not in (*NO_KEYS, *named)]
    return [
        _setting(tuple(name.lower().removeprefix(PREFIX.lower()).split(NESTED)), environ[name], f"environment {name}")
        for name in sorted(names, key=lambda name: name.count(NESTED))  # a table before its keys
    ]


def _of_sets(sets: Sequence[str], problems: list[Finding]) -> list[Setting]:
    """Return the settings of `--set a.b=1`, in order. Errors are added to `problems`."""
    settings: list[Setting] = []
    for text in sets:
        key, equals, value = text.partition("=")
        path = path_of(key)
        if path and equals:
            settings.append(_setting(path, value, "--set"))
        else:
            message = f"`{text}` is not KEY=VALUE with a dotted key"
            problems.append(problem(message, "--set", "write it as `--set actor.optimizer.lr=1e-6`"))
    return settings


def _setting(path: KeyPath, text: str, where: str) -> Setting:
    value = _typed(text, path)
    if path in BY_ONE_KEY and isinstance(value, str):
        path = (*path, BY_ONE_KEY[path])  # other settings may set other keys of the table
    return path, value, where


def _typed(text: str, path: KeyPath) -> Any:
    """Return the value of a setting, parsed as TOML; return the text itself if it is not TOML or if the key requires
    text."""
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
    """Yield the names of variables in a text, or in all texts of a table or array."""
    if isinstance(value, str):
        yield from _NAMED.findall(value)
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _named_in(inner)


def path_of(key: str) -> KeyPath:
    """Return the parts of a dotted key, parsed as TOML; empty: the text is not a key."""
    try:
        document = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    paths = list(paths_in(document))  # empty: the text is a comment
    return paths[-1] if paths and "\n" not in key else ()


def _put(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        inner = data.get(name)
        data[name] = data = inner if isinstance(inner, dict) else {}
    data[path[-1]] = value


def _without_replaced(
    node: tree.Node | None, data: Any, stronger: Any, replaced: set[KeyPath], path: KeyPath = ()
) -> Any:
    """Return a copy of a weaker layer's data without the tables that a stronger layer replaced or whose kind it
    changed."""
    if not isinstance(data, dict):
        return data
    kept: dict[str, Any] = {}
    for name, value in data.items():
        inner = tree.at(node, (name,), data) if node is not None else None
        above = stronger.get(name) if isinstance(stronger, Mapping) else None
        if isinstance(inner, tree.Choice) and isinstance(value, dict) and isinstance(above, Mapping):
            weaker_kind, stronger_kind = inner.chosen(value) or inner.usual, inner.chosen(above)
            if weaker_kind and stronger_kind and weaker_kind != stronger_kind:
                replaced.add((*path, name))
        if (*path, name) not in replaced:
            kept[name] = _without_replaced(inner, value, above, replaced, (*path, name))
    return kept
