"""Workers of a Ray, and processes of `engines.child`, forked from one that has most of their imports behind it.

    ray_forks.start()  ->  a Ray that this process starts from now on has its workers within a second

Ray starts a worker as `sys.executable default_worker.py WORDS`, and each imports Ray, torch, Megatron-Core and vLLM:
more processor time than most tests that use it. `start` forks a server off this process and puts `forked_python` in
the interpreter's place; whoever runs that hands its words, streams, folder and environment to the server, whose child
then runs the same file with them. The signals a worker gets, its death and what it prints are those of a process of
its own. What differs: its parent is the server and not the raylet (Ray knows its raylet by a variable of the
environment), `/proc/PID/environ` shows another environment than it has, and how imports go is not seen.

Cannot be forked: what has loaded Ray itself, which reads the job and the raylet of its process while it is loaded
(so every worker loads it: 0.4 s); `gcs_server` and `raylet`, which are no Python; Ray's agents, which end when their
parent is not the raylet, and its monitors, which are ended by the pid that was started.
"""

import importlib
import json
import os
import signal
import socket
import sys
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER = "ray/_private/workers/default_worker.py"
ENGINE = ["-m", "ppoctl.engines.child.serving"]

PYTHON, SOCKET = "FORKS_PYTHON", "FORKS_SOCKET"
"""Variables of the environment: the interpreter, and the server's abstract socket."""

STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forked_python")  # noqa: PTH100, PTH118, PTH120

SERVE = "--serve-workers"

SET_PARENT_DEATH_SIGNAL = 1


class _Hidden:
    """Ray, to whoever would import it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "ray":
            raise ModuleNotFoundError("hidden until this process is known", name=name)


HIDDEN = _Hidden()


def hide_ray() -> None:
    """Whoever can do without it imports as if it were not there, until `show_ray`."""
    assert "ray" not in sys.modules
    if HIDDEN not in sys.meta_path:
        sys.meta_path.insert(0, HIDDEN)  # type: ignore[arg-type]


def show_ray() -> None:
    """Import it, and again what was imported without it."""
    if HIDDEN in sys.meta_path:
        sys.meta_path.remove(HIDDEN)  # type: ignore[arg-type]
        if "vllm.v1.executor.ray_utils" in sys.modules:
            importlib.reload(sys.modules["vllm.v1.executor.ray_utils"])


def start() -> None:
    """From now on. This process has one thread and has not seen Ray; the server ends with it."""
    import warnings

    import psutil

    assert psutil.Process().num_threads() == 1
    with socket.socket(socket.AF_UNIX) as listener:
        name = _listen(listener)
        parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            server = os.fork()
        if server == 0:
            serve(listener, parent)
    stand_in(name)


@contextmanager
def served() -> "Iterator[None]":
    """As `start`, for a process that has threads, or Ray: the server is made from nothing, and preloads torch."""
    import subprocess

    interpreter, folder = sys.executable, os.path.dirname(STAND_IN)  # noqa: PTH120
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [interpreter, "-m", "ray_forks", SERVE, str(os.getpid())]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            stand_in(server.stdout.readline().strip())
            yield
        finally:
            sys.executable = interpreter
            server.kill()


def _serve_from_nothing(parent: int) -> None:
    hide_ray()
    for name in ("torch", "ppoctl.weights.bucket", "ppoctl.engines.megatron.process_group"):
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        print(_listen(listener), flush=True)
        serve(listener, parent)


def stand_in(name: str) -> None:
    """Have the server with this socket start workers."""
    if sys.executable != STAND_IN:
        os.environ[PYTHON] = sys.executable
    os.environ[SOCKET] = name
    sys.executable = STAND_IN


def _listen(listener: socket.socket) -> str:
    name = f"ppoctl-ray-forks-{os.getpid()}"
    listener.bind(f"\0{name}")
    listener.listen(64)
    return name


def serve(listener: socket.socket, parent: int) -> None:
    """Fork a child for each request; ends with its parent."""
    import ctypes

    assert "ray" not in sys.modules
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        channel, _ = listener.accept()
        with channel:
            if os.fork() == 0:
                listener.close()
                _become(channel)


def _become(channel: socket.socket) -> None:
    """Be the process that was asked for; ends with the interpreter."""
    import runpy
    import traceback

    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        _, streams, _, _ = socket.recv_fds(channel, 1, 3)
        with channel, channel.makefile("r") as text:
            request = json.load(text)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.executable = os.environ[PYTHON]
        if request["words"] == ENGINE:
            runpy.run_module(ENGINE[1], run_name="__main__")
        show_ray()
        sys.argv[:] = request["words"]
        sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - shown here, because this process ends without an interpreter's help
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(words: list[str]) -> None:
    """Hand the command of a worker or an engine to the server; run anything else in this process."""
    if words != ENGINE and not (words and words[0].endswith(WORKER)):
        os.execv(os.environ[PYTHON], [os.environ[PYTHON], *words])
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(f"\0{os.environ[SOCKET]}")
        socket.send_fds(channel, [b"?"], [0, 1, 2])
        channel.sendall(json.dumps(request).encode())


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        _serve_from_nothing(int(sys.argv[2]))
    ask(sys.argv[1:])
