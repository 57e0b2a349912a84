"""The process that `process` starts: `python -m ppoctl.engines.child.serving`, with a socket as standard input.

    comes: Target                          goes: (0, None, Failure or None)
           (number, method, arguments)           (number, answer, Failure or None)

It ends when the other end of the socket is closed, whatever it is doing: by its parent, or because that is gone.
"""

import gc
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from ppoctl.engines.child.process import START, ChildFactory, Failure


def main() -> NoReturn:
    """Make the object, and answer for it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent hears them, and ends us
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # whoever reads standard input must not take what is for us
    os.close(nothing)
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        _serve(connection)
    _end()


def _serve(connection: Connection) -> None:
    # What is imported stays: looking for garbage among it costs a third of the time that imports take.
    gc.disable()
    made, failure = _tried(_made, connection.recv())
    gc.freeze()
    gc.enable()
    connection.send((START, None, failure))
    while failure is None:
        number, method, arguments = connection.recv()
        connection.send((number, *_tried(_answered, made, method, arguments)))
    connection.recv()  # nothing comes


def _made(target: ChildFactory) -> Any:
    module, _, name = target.entry.partition(":")
    make = getattr(importlib.import_module(module), name)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(target.threads)  # and not by the variable alone, which others change
    return make(*target.arguments)


def _answered(made: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(made, method)(*arguments)


def _tried(function: Any, *arguments: Any) -> tuple[Any, Failure | None]:
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - the parent raises it, whatever it is
        stack = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever keeps it from travelling
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return None, Failure(error, stack)


def _end_with(socket: int) -> None:
    """Wait until the other end is closed; a hang-up is told without being asked for."""
    waiting = select.poll()
    waiting.register(socket, 0)
    waiting.poll()
    _end()


def _end() -> NoReturn:
    # Taking torch and vLLM apart takes seconds, and frees nothing that the system does not.
    os._exit(0)


if __name__ == "__main__":
    main()
