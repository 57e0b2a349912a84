"""`ppoctl`: the commands, and the one place where an error becomes `error:`, `hint:` and an exit code.

A command is a function in a separate module. One line below registers it. The module imports only typer, `render` and
the standard library. The function imports everything else, so that `--help` is printed at once. A command raises
`PpoctlError`, prints through `render`, and returns None (exit 0) or an exit code.
"""

import atexit
import errno
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ppoctl.cli import (
    compare,
    convert,
    diagnose,
    doctor,
    evaluate,
    logs,
    plan,
    plot,
    preview,
    profile,
    recipes,
    render,
    report,
    resume,
    rm,
    runs,
    show,
    status,
    stop,
    track,
    train,
    validate,
)
from ppoctl.cli.help import Command, Commands, as_options, one_line
from ppoctl.cli.options import found_run, is_run, takes_run
from ppoctl.core.errors import RESUME_RUN, ExitCode, PpoctlError, quoted, without_secrets

app = typer.Typer(
    name="ppoctl",
    cls=Commands,
    help="PPO for language models: plan, kill, resume and verify a run.",
    epilog="Start with: ppoctl recipes list. Options of a command: ppoctl help COMMAND",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(cls=Command)(train.train)
app.command(cls=Command)(train.rollout)
app.command("eval", cls=Command)(evaluate.evaluate)
app.command(cls=Command)(takes_run(resume.resume))
app.command(cls=Command)(validate.validate)
app.command(cls=Command)(preview.preview)
app.command(cls=Command)(plan.plan)
app.command(cls=Command)(doctor.doctor)
app.command(cls=Command)(runs.runs)
app.command(cls=Command)(takes_run(status.status))
app.command(cls=Command)(takes_run(logs.logs))
app.command(cls=Command)(takes_run(stop.stop))
app.command(cls=Command)(takes_run(rm.rm))
app.command(cls=Command)(takes_run(show.show))
app.command(cls=Command)(takes_run(plot.plot))
app.command(cls=Command)(takes_run(profile.profile))
app.command(cls=Command)(takes_run(diagnose.diagnose))
app.command(cls=Command)(takes_run(compare.compare))
app.command(cls=Command)(takes_run(report.report))
app.command("convert-ckpt", cls=Command)(convert.convert_ckpt)
app.command(cls=Command)(takes_run(track.track))
app.add_typer(recipes.app, name="recipes")


@app.callback(invoke_without_command=True)
def _global_options(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
    debug: Annotated[  # noqa: ARG001
        bool, typer.Option("--debug", help="Print the tracebacks of errors. Valid before or after the command.")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        render.line(f"ppoctl {version_of('ppoctl')}")
        raise typer.Exit


def main() -> None:
    """Run the shell command `ppoctl`."""
    # torch reads both variables at its first import. Without the first, the C++ code of torch warns about NUMA
    # binding at every engine start. Without the second, waiting threads spin, and a busy machine is ten times slower.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _open_closed_streams()
    try:
        code = run(sys.argv[1:])
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python reports the error again at exit
        code = 128 + signal.SIGPIPE
    _leave(code)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed.

    Otherwise the next file that the run opens would get the free descriptor and receive the output of libraries.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115


def _leave(code: int) -> NoReturn:
    """Exit the process. If torch is loaded, only the exit handlers are run, and nothing is torn down.

    Tearing down the modules of torch and vLLM takes seconds. The operating system frees their memory in any case.
    """
    if "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. Every error of a command is handled here."""
    own = list(arguments)[: list(arguments).index("--")] if "--" in arguments else list(arguments)
    # `--json` is looked up before parsing, so that a parse error is printed in the requested form, too.
    debug, as_json = "--debug" in own, "--json" in own and not {"--help", "-h"} & {*own}
    if not as_json:
        return _run(arguments, debug=debug, as_json=False)
    with render.one_object():
        return _run(arguments, debug=debug, as_json=True)


def _run(arguments: Sequence[str], *, debug: bool, as_json: bool) -> int:
    words = as_options([word for word in arguments if word != "--debug"]) or ["--help"]
    try:
        result = app(words, prog_name="ppoctl", standalone_mode=False)
        code = int(result) if isinstance(result, int) else ExitCode.DONE
    except PpoctlError as error:
        failure = _Failure(type(error).__name__, error.message, _named(error.hint, words), int(error.exit_code))
        return _report(failure, error, debug=debug, as_json=as_json)
    except typer.Abort:
        code = ExitCode.INTERRUPTED
    except SystemExit as error:  # typer raises this for a broken pipe
        raise error.__context__ or error from None
    except Exception as error:  # noqa: BLE001 - last resort: a user never sees a raw traceback
        return _report(_failure_of(error, words), error, debug=debug, as_json=as_json)
    if code == ExitCode.INTERRUPTED and as_json:  # Ctrl-C outside a run, which typer turned into an exit code
        render.json(_Failure("InterruptedByUserError", "interrupted", None, code).as_json())
    return code


def _named(hint: str | None, words: Sequence[str]) -> str | None:
    """Return the hint with the run and the recipes of the command line in place of RUN and RECIPE, which packages
    write that know neither. Without a run, only the setting of a resume is left."""
    run = next((found_run(Path(word)) for word in words[1:] if is_run(found_run(Path(word)))), None)
    recipes = [word for word in words[1:] if word.endswith(".toml")]
    recipes = recipes or ([] if run is None else [str(run / "recipe.toml")])
    for name, value in (("RUN", run and quoted(run)), ("RECIPE", " ".join(map(quoted, recipes)))):
        if hint and value:
            hint = value.join(re.split(rf"\b{name}\b", hint))
    return hint and hint.replace(RESUME_RUN + " --", "--")


class _Failure:
    """An error as it is printed."""

    def __init__(self, kind: str, message: str, hint: str | None, code: int) -> None:
        self.kind, self.message, self.hint, self.code = kind, without_secrets(message), hint, code

    def as_json(self) -> dict[str, Any]:
        lines = self.message.splitlines()
        fields = {"kind": self.kind, "message": self.message, "problems": lines, "hint": self.hint}
        return {"error": {**fields, "exit_code": self.code}}


def _report(failure: _Failure, error: BaseException, *, debug: bool, as_json: bool) -> int:
    if debug:
        render.print_stderr(_traceback(error).rstrip())
    if as_json:
        render.json(failure.as_json())
    else:
        render.error(failure.message)
        if failure.hint:
            render.hint(failure.hint)
    return failure.code


def _failure_of(error: Exception, words: Sequence[str]) -> _Failure:
    """Return the failure for an error that is not a `PpoctlError`."""
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _usage(error, words)
    if (limit := _limit_of_the_shell(error)) is not None:
        return _Failure("EnvironmentProblemError", *limit, ExitCode.ENVIRONMENT)
    is_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if is_memory or type(error).__name__ == "OutOfMemoryError":
        message = f"out of memory: {_first_line(error)}"
        return _Failure("OutOfMemoryError", message, "lower [actor.batching] and [critic.batching]", ExitCode.MEMORY)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        file = f" (`{error.filename}`)" if error.filename else ""
        return _Failure("StorageError", f"the disk is full{file}", "df -h .", ExitCode.STORAGE)
    if isinstance(error, OSError) and error.filename:
        message = f"`{error.filename}`: {(error.strerror or str(error)).lower()}"
        return _Failure("StorageError", message, f"ls -ld {quoted(str(error.filename))}", ExitCode.STORAGE)
    message = f"internal: {type(error).__name__}: {_first_line(error)}"
    hint = f"less {quoted(_keep_traceback(error))}  # the traceback, for a bug report"
    return _Failure("InternalError", message, hint, ExitCode.INTERNAL)


_NO_ADDRESSES = ("cannot allocate memory", "failed to map segment", "can't start new thread")
"""Error texts of libraries, in lower case, for a process that cannot map more addresses."""
_NO_PROCESSES = ("resource temporarily unavailable", "can't start new thread")
"""Error texts of libraries, in lower case, for a user who cannot start more processes."""


def _limit_of_the_shell(error: Exception) -> tuple[str, str] | None:
    """Return message and hint of an error that a limit of the shell caused; None for other errors."""
    text = str(error).lower()
    if "too many open files" in text:
        return "too many open files: the limit of this shell is too low", "ulimit -n 4096"
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    is_memory = isinstance(error, MemoryError) or any(words in text for words in _NO_ADDRESSES + _NO_PROCESSES)
    if space != resource.RLIM_INFINITY and is_memory:
        message = f"out of addresses: `ulimit -v` is {space // 1024}; addresses that are only reserved count too"
        return f"{message} ({_first_line(error)})", "ulimit -v unlimited"
    if any(words in text for words in _NO_PROCESSES):
        message = f"a process or thread cannot be started: {_first_line(error)}"
        return message, "ulimit -u unlimited  # threads of this user: ps -eLf | wc -l"
    return None


_NUMBER_ERRORS = {
    "greater_than_equal": "is less than {ge:g}",
    "int_parsing": "is not a whole number",
    "float_parsing": "is not a number",
}
"""Message for an invalid number of an option, by pydantic's error type."""


def _usage(error: Any, words: Sequence[str]) -> _Failure:
    """Return the failure for typer's error about a command line."""
    text = re.sub(r"'([^']*)'", r"`\1`", one_line(_usage_message(error))).replace("Value error, ", "")
    text = re.sub(r"(-\S+) \(Possible options: (.*)\)$", _closest, text)
    text = re.sub(r"\. Did you mean ", "; did you mean ", text)
    text = re.sub(r"(No such option:?) (-\S+?)(?=$|;)", r"\1 `\2`", text).replace("option: `", "option `")
    context = getattr(error, "ctx", None)
    typed = " ".join(["ppoctl", *(word for word in words[:1] if not word.startswith("-"))])
    command = typed if context is None else context.command_path
    message = (text[:1].lower() + text[1:]).rstrip(".")
    return _Failure("UsageError", message, f"{command} --help", ExitCode.USAGE)


def _usage_message(error: Any) -> str:
    """Return typer's message. For an invalid number, return a message that contains the number."""
    text = str(error.format_message())
    for details in getattr(error.__cause__, "errors", list)():
        if (words := _NUMBER_ERRORS.get(details["type"])) is not None:
            text = text.replace(details["msg"], f"`{details['input']}` {words.format(**details.get('ctx', {}))}")
    return text


def _closest(match: re.Match[str]) -> str:
    word, options = match[1], match[2].split(", ")
    return f"{word}; did you mean `{get_close_matches(word, options, n=1, cutoff=0)[0]}`?"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _traceback(error: BaseException) -> str:
    return without_secrets("".join(traceback.format_exception(error)))


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback to a new temporary file that only this user can read, and return its path.

    The name is unpredictable, so that no other user can create the file first.
    """
    descriptor, name = tempfile.mkstemp(prefix="ppoctl-traceback-", suffix=".log")
    with open(descriptor, "w", encoding="utf-8") as log:  # noqa: PTH123 - mkstemp created it with mode 600
        log.write(_traceback(error))
    return name


if __name__ == "__main__":
    main()
