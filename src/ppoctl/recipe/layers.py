"""The layers of a recipe, weakest first: the site's file, files from left to right, environment, `--set`.

    slurm.toml  a.toml  b.toml  PPOCTL_ACTOR__OPTIMIZER__LR=1e-6  --set steps=40
         |         |       |                |                          |
         +---------+-------+----------- deep merge --------------------+--> one dict, and for each value its layer

The strongest layer is read first, and weaker ones are merged below it; the defaults of a table that was written are
the weakest. The value of a variable is read as that of `--set` is: a table among them is the whole value of its key,
and of the weaker layers only the defaults have a say in it. A table whose alternative (`kind`, `place`, `format`) a
stronger layer changes is dropped whole from the weaker ones. Relative paths become absolute: in the layer
that wrote them, or where the command was typed where they begin with an environment variable. Nothing here judges
values, but for the site's file: it may say nothing that changes a result.
"""

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ppoctl.errors import MissingAssetError
from ppoctl.model.folder import is_hub_id, is_url
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import DEFAULT, KeyPath, dotted, lines_of, paths_in
from ppoctl.recipe.problems import Problem
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm import is_image_file
from ppoctl.rewards.python import digest_of, file_of
from ppoctl.table import Effect

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

_SCORERS = ((), ("parts", tree.ANY_NAME), ("cases", tree.ANY_NAME), ("otherwise",))
MODELS = (("model", "path"), ("model", "critic", "path"), *(("reward", *path, "path") for path in _SCORERS))
"""Paths of the keys that name a model folder or a hub id."""
IMAGE = ("slurm", "container", "image")
_SETS = (("data", "train"), ("data", "eval", tree.ANY_NAME))
ROWS = (*_SETS, *((*path, "sources", tree.ANY_NAME) for path in _SETS))
"""Paths of the tables that name rows."""
DATASETS = tuple((*path, "dataset", "path") for path in ROWS)
FILES = tuple((*path, key) for path in ROWS for key in ("path", "prompt_file", "function"))
FUNCTIONS = (*(("reward", *path, "function") for path in _SCORERS), ("eval", "metrics", "function"))
"""Paths of the keys that name a function that scores or measures, each with the digest of its file beside it."""
PATHS = (*MODELS, *DATASETS, *FILES, IMAGE, ("slurm", "secrets"))
BY_ONE_KEY: dict[KeyPath, str] = {("model", "critic"): "path", ("eval", "metrics"): "function"}
"""Paths of the tables that may be written as the value of one of their keys (`schema.PathOrTable`), with that key."""
LENGTHS = {"steps", "epochs"}
"""Keys that say how long a run is: a layer that writes one of them writes none of the other's."""
COMPLETE = "parallel"
"""Name of the tables that say all there is to say (`ParallelTable`): writing one sets its other keys to 1 or off."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})(?=/|$)")
_NAMED = re.compile(r"\$\{?(\w+)")


@dataclass(frozen=True)
class Layer:
    """One source of values: a file, the environment, all `--set`, or defaults."""

    data: dict[str, Any]
    place: Callable[[KeyPath], str]
    """Where the layer sets the value at a path."""
    base: Path = field(default_factory=Path.cwd)
    """Folder at which the layer's relative paths start."""
    whole: tuple[KeyPath, ...] = ()
    """Paths of tables that replace those of weaker layers instead of being merged with them."""


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
    sources: list[Layer] = field(default_factory=list)
    """The layers that were read, strongest first, each with the data that it contributes."""
    replaced: set[KeyPath] = field(default_factory=set)
    """Paths of alternatives that a stronger layer changed and of tables that it wrote whole; weaker layers have no
    say there."""

    counts_epochs: bool = False
    """Whether `steps` was counted from `epochs` (see `run_length`)."""

    def read(self) -> None:
        """Read and merge all layers; what is wrong with one of them is added to `problems`."""
        sets = _of_sets(self.sets, self.problems)
        files = [_from_file(file) for file in reversed(self.files)]
        if self.site is not None:
            files.append(_from_file(self.site))
            self.problems += _changing_results(files[-1])
        settings = [*sets, *_of_environment(self.environ, ())]
        values = [*(file.data for file in files), *(_typed(text, path) for path, text, _ in settings)]
        named = {name for value in values for name in _named_in(value)}
        for layer in (_from_settings(sets), _from_settings(_of_environment(self.environ, named)), *files):
            self._add(layer)
        # `--set health.kl.action=stop` leaves the bound of that rule at its default; so does a table written whole.
        self.replaced.clear()
        self._add(Layer(tree.defaults_beside(ROOT, self.written), lambda _: DEFAULT))

    def place(self, path: KeyPath) -> str:
        """Where the value at this path was set; for a table, where the strongest layer that has it writes it."""
        path = (*path[:-1], "function") if path[-1:] == ("digest",) else path
        path = ("epochs",) if path == ("steps",) and self.counts_epochs else path
        for source in self.sources:
            if _has(source.data, path):
                return source.place(path)
        return DEFAULT

    def _add(self, layer: Layer) -> None:
        kept = _without_replaced(ROOT, layer.data, self.written, self.replaced)
        if LENGTHS & self.written.keys():
            kept = {name: value for name, value in kept.items() if name not in LENGTHS}
        elif kept.keys() >= LENGTHS:
            says = "`steps` and `epochs` are both written, and each says how long the run is"
            self.problems.append(Problem(layer.place(("epochs",)), says, "remove one of the two"))
            del kept["epochs"]
        # Only now: a table that the layer writes whole hides those of weaker layers, and not its own.
        self.replaced.update(layer.whole)
        for pattern, key in BY_ONE_KEY.items():
            for path, table in _matching(kept, pattern):
                if isinstance(table[path[-1]], str):
                    table[path[-1]] = {key: table[path[-1]]}
        self._resolve_paths(layer, kept)
        self.sources.append(replace(layer, data=kept))
        self.written = _merged(kept, self.written)

    def _resolve_paths(self, layer: Layer, kept: dict[str, Any]) -> None:
        """Make absolute what is a path in the layer's data."""
        for pattern in PATHS:
            for path, table in _matching(kept, pattern):
                # One that a stronger layer has in its place is read by nobody: its variable need not be set.
                if _has(self.written, path):
                    continue
                value, may_be_hub = table[path[-1]], pattern in (*MODELS, *DATASETS)
                if isinstance(value, str):
                    table[path[-1]] = self._resolved(layer, path, value, may_be_hub=may_be_hub)
                elif isinstance(value, list):
                    table[path[-1]] = [
                        self._resolved(layer, path, each, may_be_hub=False) if isinstance(each, str) else each
                        for each in value
                    ]
        for pattern in FUNCTIONS:
            for path, table in _matching(kept, pattern):
                if isinstance(table["function"], str):
                    self._resolve_function(layer, path, table)

    def _resolved(self, layer: Layer, path: KeyPath, text: str, *, may_be_hub: bool) -> str:
        """The path of a folder or a file as an absolute one, unless it is a hub id or names an image elsewhere."""
        base = layer.base
        if is_url(text) or (path == IMAGE and not is_image_file(text)):
            return text
        if VARIABLE.match(text):
            base = Path.cwd()  # where somebody typed it
            try:
                text = _expanded(dotted(path), text, self.environ)
            except MissingAssetError as error:
                self.problems.append(Problem(layer.place(path), error.message, error.hint, MissingAssetError))
                return text
        if may_be_hub and is_hub_id(text) and not (base / text.split("/")[0]).exists():
            return text
        # Without `..`, and without following links: a run keeps the name a person gave.
        return os.path.normpath((base / Path(text).expanduser()).absolute())

    def _resolve_function(self, layer: Layer, path: KeyPath, table: dict[str, Any]) -> None:
        """Make the path of a function's file absolute, and note its digest where the layer does not have it."""
        if (file := file_of(table["function"])) is not None:
            whole = self._resolved(layer, path, str(file), may_be_hub=False)
            table["function"] = f"{whole}:{table['function'].rpartition(':')[2]}"
        table.setdefault("digest", digest_of(table["function"]))


def site_file(environ: Mapping[str, str]) -> Path | None:
    """The file with what a site wants of every run: the one that `PPOCTL_SITE` names, else `ppoctl/slurm.toml` in the
    user's folder of settings if it is there. None: there is none; without a home in `environ` nobody looks."""
    if SITE in environ:
        return Path(environ[SITE]).expanduser() if environ[SITE] else None
    home = environ.get("HOME")
    settings = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else None)
    file = Path(settings, "ppoctl", "slurm.toml") if settings else None
    return file if file is not None and file.is_file() else None


def _changing_results(site: Layer) -> Iterator[Problem]:
    """A problem for each key of the site's file that changes results: one recipe would be another one elsewhere."""
    for path in paths_in(site.data):
        if any(key.effect is Effect.RESULTS for key in tree.keys_at(ROOT, path)):
            says = f"`{dotted(path)}` changes results, and a site's file may not: the recipe alone says what a run is"
            yield Problem(site.place(path), says, "move the line into the recipe")


def _from_file(file: Path) -> Layer:
    text = file.read_text("utf-8-sig")
    data, lines = tomllib.loads(text), lines_of(text)

    def place(path: KeyPath) -> str:
        # A value inside an array stands where its array stands when it has no line of its own.
        known = (path[:length] for length in range(len(path), 0, -1) if path[:length] in lines)
        return next((f"{file}:{lines[key]}" for key in known), str(file))

    return Layer(data, place, file.parent, tuple(path for path in lines if path[-1] == COMPLETE))


Setting = tuple[KeyPath, str, str]
"""A dotted key, its value as text, and where the two were given."""


def _of_environment(environ: Mapping[str, str], named: Collection[str]) -> list[Setting]:
    """Settings of `PPOCTL_ACTOR__OPTIMIZER__LR` and the like: of every variable with our prefix, so that a misspelt
    one is an unknown key, but for those that a value of the recipe has `named`."""
    found: list[Setting] = [
        (tuple(name.lower().removeprefix(PREFIX.lower()).split(NESTED)), text, f"environment {name}")
        for name, text in environ.items()
        if name.upper().startswith(PREFIX) and name not in (*NO_KEYS, *named)
    ]
    return sorted(found, key=lambda setting: len(setting[0]))  # a table before what is inside it


def _of_sets(sets: Sequence[str], problems: list[Problem]) -> list[Setting]:
    """Settings of `--set a.b=1`, in order."""
    found: list[Setting] = []
    for text in sets:
        key, equals, value = text.partition("=")
        path = path_of(key)
        if path and equals:
            found.append((path, value, "--set"))
        else:
            says = f"`{text}` is not KEY=VALUE with a dotted key"
            problems.append(Problem("--set", says, "write it as `--set actor.optimizer.lr=1e-6`"))
    return found


def _from_settings(settings: Sequence[Setting]) -> Layer:
    """One layer of single settings, later ones over earlier ones."""
    data: dict[str, Any] = {}
    whole: list[KeyPath] = []
    for path, text, _ in settings:
        value = _typed(text, path)
        if path in BY_ONE_KEY and isinstance(value, str):
            path = (*path, BY_ONE_KEY[path])  # other settings may be of keys beside it
        _put(data, path, value)
        whole += [path] if isinstance(value, dict) else []

    def place(path: KeyPath) -> str:
        return [where for given, _, where in settings if given[: len(path)] == path[: len(given)]][-1]

    return Layer(data, place, whole=tuple(whole))


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


def _merged(weaker: Any, stronger: Any) -> Any:
    """Both tables in one; the stronger value where both have a key that is no table."""
    if not isinstance(weaker, dict) or not isinstance(stronger, dict):
        return stronger
    both = {name: _merged(weaker[name], value) if name in weaker else value for name, value in stronger.items()}
    return weaker | both


def _has(data: Any, path: KeyPath) -> bool:
    for name in path:
        if isinstance(data, list):
            return True
        if not isinstance(data, Mapping) or name not in data:
            return False
        data = data[name]
    return True


def _matching(data: Any, pattern: KeyPath, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every written key that fits the pattern, with the table it stands in."""
    if not isinstance(data, dict):
        return
    names = list(data) if pattern[0] == tree.ANY_NAME else [pattern[0]]
    for name in names:
        if name in data and len(pattern) == 1:
            yield (*path, name), data
        elif name in data:
            yield from _matching(data[name], pattern[1:], (*path, name))


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


def told_uri(uri: str | None) -> str | None:
    """The tracking URI as MLflow is told it. A variable stays a name until here, so that its value is written
    nowhere. Raises MissingAssetError where it is not set."""
    return None if uri is None else _expanded("tracking.uri", uri, os.environ)


def _expanded(key: str, text: str, environ: Mapping[str, str]) -> str:
    """The value of a key with the variable that it begins with, if any, in place of its name. Raises
    MissingAssetError where the variable is not set."""
    variable = VARIABLE.match(text)
    if variable is None:
        return text
    name = variable[1] or variable[2]
    if not environ.get(name):
        raise MissingAssetError(
            f"`{key}` is `{text}`, and the environment has no `{name}`", hint=f"export {name}=VALUE"
        )
    return environ[name] + text[variable.end() :]
