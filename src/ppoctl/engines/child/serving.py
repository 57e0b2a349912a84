"""The child process that `process` starts: `python -m ppoctl.engines.child.serving`, with a socket as standard input.

    receives: ChildFactory                     sends: (0, None, Failure or None)
              (number, method, arguments)             (number, result, Failure or None)

The process ends when the other end of the socket is closed, by its parent or because the parent has ended.
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
    """Create the object and serve calls of its methods."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent receives the signals, and ends this process
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # otherwise code that reads standard input would take messages of the parent
    os.close(nothing)
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, ConnectionError):
        _serve(connection)
    _end()


def _serve(connection: Connection) -> None:
    # No garbage collection during imports: scanning the imported objects would take a third of the import time.
    gc.disable()
    target, failure = _call_safely(_create, connection.recv())
    # Later collections need not scan the imported objects, which stay.
    gc.freeze()
    gc.enable()
    connection.send((START, None, failure))
    while failure is None:
        number, method, arguments = connection.recv()
        connection.send((number, *_call_safely(_call, target, method, arguments)))
    connection.recv()  # after a failure: wait until the parent closes the socket


def _create(target: ChildFactory) -> Any:
    module, _, name = target.entry.partition(":")
    make = getattr(importlib.import_module(module), name)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(target.threads)  # other code may have changed OMP_NUM_THREADS
    return make(*target.arguments)


def _call(target: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(target, method)(*arguments)


def _call_safely(function: Any, *arguments: Any) -> tuple[Any, Failure | None]:
    try:
        return function(*arguments), None
    except BaseException as error:  # noqa: BLE001 - the parent raises every error
        stack = "".join(traceback.format_exception(error))
        try:
            # Some errors can be pickled but not restored, for example if their constructor has other arguments.
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - the error cannot be pickled, for any reason
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return None, Failure(error, stack)


def _end_with_parent(socket: int) -> None:
    """End the process when the other end of the socket is closed. `poll` reports a hang-up even if no event is
    requested."""
    waiting = select.poll()
    waiting.register(socket, 0)
    waiting.poll()
    _end()


def _end() -> NoReturn:
    # Shutting down torch and vLLM takes seconds and frees nothing that the operating system does not free.
    os._exit(0)


if __name__ == "__main__":
    main()
