"""Functions of the user that a recipe names as `path.py:name` or `module:name`: their files, import and errors.

Rows, rewards, losses, estimators, environments, tools and metrics are all imported here. Scorer processes and trainer
processes import this module, so it imports only the standard library.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ppoctl.core.errors import MissingFileError, PpoctlError, RecipeError, quoted

FUNCTION_PATTERN = r"^.+:[A-Za-z_][A-Za-z0-9_]*$"
_MESSAGE_CHARS = 150
"""Maximum number of characters of an error message, so that the line in the user's file still fits."""


def file_of(function: str) -> Path | None:
    """Return the file of `path.py:name`; None for `module:name`."""
    location = function.rpartition(":")[0]
    return Path(location) if location.endswith(".py") else None


def digest_of(function: str) -> str:
    """Return the SHA-256 (hex) of the file of a function, and of the files of `siblings`; "" for `module:name`, or if
    the file cannot be read."""
    file = file_of(function)
    own = "" if file is None else _digest(file)
    if file is None or not own or not (others := siblings(file)):
        return own
    listing = [own, *(f"{path.relative_to(file.parent)} {_digest(path)}" for path in others)]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def siblings(file: Path) -> list[Path]:
    """Return the Python files in the folder of a file that it imports, also indirectly or inside of a function: a
    module, or all files of a package, with or without `__init__.py`. Imports with a computed name are not found."""
    found, todo = set[Path](), [file]
    while todo:
        reader = todo.pop()
        new = {path for name in _imports(reader) for path in _files_of(file.parent, name)} - found - {file}
        found |= new
        todo += new
    return sorted(found)


def _imports(file: Path) -> set[str]:
    """Return the first parts of the names of all modules that a file imports."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError):  # the import reports it
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names} - {""} - sys.stdlib_module_names


def _files_of(folder: Path, name: str) -> list[Path]:
    module, package = folder / f"{name}.py", folder / name
    if (package / "__init__.py").is_file():
        return sorted(package.rglob("*.py"))
    if module.is_file():
        return [module]
    if not package.is_dir():
        return []
    # Python imports a folder without `__init__.py` only if no folder of its search path has a module of that name.
    found = importlib.machinery.PathFinder.find_spec(name)
    return sorted(package.rglob("*.py")) if found is None or found.origin is None else []


def require_function(function: str, digest: str, *, whose: str, setting: str, changed: type[PpoctlError]) -> None:
    """Raise MissingFileError if a function's file does not exist, and `changed` if the file has another digest than
    the recorded `digest` (empty: not checked). `setting` is the setting that names the function, as for `--set`."""
    file = file_of(function)
    if file is None:
        return
    current = digest_of(function)
    if digest and digest == _digest(file):  # recorded by a version whose digests omitted siblings
        return
    if not current:
        raise MissingFileError(
            f"the {whose} function is `{function}`, but the file `{file}` does not exist",
            hint=f"ls -l {quoted(file.parent)}",
        )
    imports = ", or a file of its folder that it imports," if siblings(file) else ""
    if digest and current != digest:
        raise changed(
            f"the {whose} function has changed: `{file}`{imports} differs from the file that the recipe was read "
            f"with (digest {current[:12]}, recorded {digest[:12]})",
            hint=f"restore the file, or accept it: `ppoctl resume RUN --set {quoted(setting)}`",
        )


def import_command(function: str) -> str:
    """Return a command that imports the function in the same way, and shows the error of an import that fails."""
    return f"python -m ppoctl.core.user_functions {quoted(function)}"


def imported(function: str) -> Callable[..., Any]:
    """Import the file or module, and return the function. Raises any error of the import, AttributeError if there is
    no such name, and TypeError if the name is not a function. A file is imported once for each of its contents."""
    location, _, name = function.rpartition(":")
    file = file_of(function)
    module = importlib.import_module(location) if file is None else _module_of(file.absolute(), digest_of(function))
    member = getattr(module, name, None)
    if callable(member):
        return member  # type: ignore[no-any-return]
    if member is not None:
        raise TypeError(f"`{name}` of `{location}` is a {type(member).__name__}, not a function")
    own = (key for key, value in vars(module).items() if key[0] != "_" and _is_defined_in(module, value))
    raise AttributeError(f"`{location}` has no `{name}`; it defines {', '.join(sorted(own)) or 'nothing'}")


def _is_defined_in(module: ModuleType, value: object) -> bool:
    """Whether a value is a function, or a class that the module does not import."""
    return inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__)


@cache
def _module_of(file: Path, digest: str) -> ModuleType:
    """Import a file with this digest as a module. The file's folder comes last in the search path, so that a
    `math.py` in this folder does not hide another module."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    _require_own(file)
    name = f"user_{file.stem}"
    if name in sys.modules:  # of another folder, or of earlier content: pickle and dataclasses still look for it
        name = f"{name}_{hashlib.sha256(f'{file} {digest}'.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_seen: dict[Path, str] = {}
"""Sibling -> digest when it was last imported."""


def _require_own(file: Path) -> None:
    """Raise ImportError if a sibling that the file imports has the name of another module. If siblings have changed,
    forget them, so that the import of the file reads them again."""
    others = siblings(file)
    names = {path.relative_to(file.parent).parts[0].removesuffix(".py") for path in others}
    digests = {path: _digest(path) for path in others}
    if any(_seen.get(path, digest) != digest for path, digest in digests.items()):
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
    _seen.update(digests)
    for name in sorted(names):
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
        origin = _origin(spec)
        own = file.parent / name / "__init__.py"
        if not own.is_file():
            module = file.parent / f"{name}.py"
            own = module if module.is_file() else file.parent / name
        if origin is None or origin.resolve() != own.resolve():
            raise ImportError(f"`{name}` is `{origin}` in this process, not `{own}`: rename one of the two")


def _origin(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    """Return the file of a module, or the first folder of a package without `__init__.py`."""
    if spec is None:
        return None
    files = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
    return Path(files[0]) if files else None


def require_accepts(call: partial[Any], function: str, argument: str, *, count: int = 1) -> None:
    """Raise TypeError if the function does not accept `count` arguments and its options. `argument` describes the
    arguments."""
    try:
        signature = inspect.signature(call.func)
    except ValueError:  # some C functions have no signature
        return
    try:
        signature.bind(*(object(),) * count, **call.keywords)
    except TypeError as error:
        options = ", ".join(f"`{name}`" for name in call.keywords)
        raise TypeError(
            f"`{function.rpartition(':')[2]}{signature}` is called with {argument}"
            + (f" and the options {options}" if options else " alone" if count else "")
            + f": {error}"
        ) from error


def described(error: BaseException, function: str, *, caller: str) -> str:
    """Return type and message of an error, and the line of the user's file that raised it. `caller` is the file that
    called the function."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file_of(function))]
    others = [frame for frame in frames if frame.filename not in (caller, __file__)]
    at = (own or others or [None])[-1]  # type: ignore[list-item]
    location = "" if at is None else f" ({Path(at.filename).name}:{at.lineno}, in `{at.name}`: `{at.line}`)"
    message = " ".join(str(error).split())[:_MESSAGE_CHARS]
    return f"{type(error).__name__}: {message}{location}"


@dataclass(frozen=True)
class TrainingFunction:
    """A function of the user that processes of a training call. Only its name is sent to other processes: each
    process imports the file at the first call."""

    key: str
    """Key of the recipe table that names the function."""
    function: str
    options: Mapping[str, Any]
    """Keyword arguments of the function."""
    digest: str
    """SHA-256 of the function's file when the recipe was read; empty: not checked."""

    def __call__(self, argument: object) -> Any:
        """Return what the function returns. Raises RecipeError if its file has changed, cannot be imported, or if the
        function raises an error, with the line of the file."""
        call = partial(_callable(self.key, self.function, self.digest), **self.options)
        try:
            require_accepts(call, self.function, f"a `{type(argument).__name__}`")
            return call(argument)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the code of a user may raise any error
            self.refuse(f"failed: {described(error, self.function, caller=__file__)}", error)

    @property
    def _setting(self) -> str:
        return f"{self.key}.function={self.function}"

    def require_there(self) -> None:
        """Raise MissingFileError if the file does not exist, and RecipeError if the file has changed since the
        recipe was read."""
        require_function(
            self.function, self.digest, whose=f"`{self.key}`", setting=self._setting, changed=RecipeError
        )

    def refuse(self, problem: str, cause: BaseException | None = None) -> NoReturn:
        """Raise RecipeError about what the function did."""
        raise RecipeError(f"`{self.key}.function` is `{self.function}`: it {problem}", hint=VALIDATE) from cause


VALIDATE = "ppoctl validate RECIPE --loss"
"""Hint of every error of a training function."""


@cache
def _callable(key: str, function: str, digest: str) -> Callable[..., Any]:
    """Return the function, whose file is imported once per process."""
    TrainingFunction(key, function, {}, digest).require_there()
    try:
        return imported(function)
    except (Exception, SystemExit) as error:  # the code of a user may raise any error
        raise RecipeError(
            f"`{key}.function` is `{function}`: it cannot be imported: {described(error, function, caller=__file__)}",
            hint=import_command(function),
        ) from error


if __name__ == "__main__":
    imported(sys.argv[1])
