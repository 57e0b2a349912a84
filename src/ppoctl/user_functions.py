"""Functions of the user that a recipe names as `path.py:name` or `module:name`: their files, import and errors.

Scorer processes and trainer processes import this module, so it imports only the standard library.
"""

import hashlib
import importlib
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

from ppoctl.errors import MissingFileError, PpoctlError, RecipeError, quoted

FUNCTION_PATTERN = r"^.+:[A-Za-z_][A-Za-z0-9_]*$"
_MESSAGE_CHARS = 150
"""Maximum number of characters of an error message, so that the line in the user's file still fits."""


def file_of(function: str) -> Path | None:
    """Return the file of `path.py:name`; None for `module:name`."""
    location = function.rpartition(":")[0]
    return Path(location) if location.endswith(".py") else None


def digest_of(function: str) -> str:
    """Return the SHA-256 (hex) of the file of a function; "" for `module:name`, or if the file cannot be read."""
    file = file_of(function)
    try:
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def require_function(function: str, digest: str, *, whose: str, setting: str, changed: type[PpoctlError]) -> None:
    """Raise MissingFileError if a function's file does not exist, and `changed` if the file has another digest than
    the recorded `digest` (empty: not checked). `setting` is the setting that names the function, as for `--set`."""
    file = file_of(function)
    if file is None:
        return
    current = digest_of(function)
    if not current:
        raise MissingFileError(
            f"the {whose} function is `{function}`, but the file `{file}` does not exist",
            hint=f"ls -l {quoted(file.parent)}",
        )
    if digest and current != digest:
        raise changed(
            f"the {whose} function has changed: `{file}` differs from the file that the recipe was read with "
            f"(digest {current[:12]}, recorded {digest[:12]})",
            hint=f"restore the file, or accept it: `ppoctl resume RUN --set {quoted(setting)}`",
        )


def import_command(function: str) -> str:
    """Return a command that imports the function's module, and shows the error of an import that fails."""
    file = file_of(function)
    return f"python {quoted(file)}" if file else f"python -c 'import {function.partition(':')[0]}'"


def imported(function: str) -> Callable[..., Any]:
    """Import the file or module, and return the function. Raises any error of the import, AttributeError if there is
    no such name, and TypeError if the name is not a function."""
    location, _, name = function.rpartition(":")
    file = file_of(function)
    module = importlib.import_module(location) if file is None else _module_of(file)
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


def _module_of(file: Path) -> ModuleType:
    """Import a file as a module. The file's folder comes last in the search path, so that a `math.py` in this folder
    does not hide another module."""
    sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"user_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


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
        except Exception as error:  # noqa: BLE001 - the code of a user may raise any error
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

    def refuse(self, problem: str, cause: Exception | None = None) -> NoReturn:
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
    except Exception as error:  # the code of a user may raise any error
        raise RecipeError(
            f"`{key}.function` is `{function}`: it cannot be imported: {described(error, function, caller=__file__)}",
            hint=import_command(function),
        ) from error
