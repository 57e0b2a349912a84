"""Fork server for Ray workers and processes of `engines.child`: the server has already done most of their imports.

    ray_forks.start()  ->  a Ray that this process starts afterwards has its workers within a second

Ray starts a worker as `sys.executable default_worker.py WORDS`, and each worker imports Ray, torch, Megatron-Core and
vLLM, which takes more CPU time than most tests that use it. `start` forks a server from this process and sets
`sys.executable` to `forked_python`. That program sends its arguments, streams, folder and environment to the server,
whose child runs the same file with them. Signals, death and output are those of a separate process. Three things
differ: the parent of a worker is the server, not the raylet (Ray finds its raylet by an environment variable);
`/proc/PID/environ` shows another environment; and the tests do not cover a worker's imports.

Some processes cannot be forked. Ray reads job and raylet while it is imported, so every worker imports Ray itself
(0.4 s). `gcs_server` and `raylet` are not Python. Ray's agents end if their parent is not the raylet, and its
monitors are killed by the pid that was started.
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
"""Environment variables: the interpreter, and the server's abstract socket."""

STAND_IN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forked_python")  # noqa: PTH100, PTH118, PTH120

SERVE = "--serve-workers"

SET_PARENT_DEATH_SIGNAL = 1


class _Hidden:
    """An import hook that hides Ray."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "ray":
            raise ModuleNotFoundError("hidden until this process is known", name=name)


HIDDEN = _Hidden()


def hide_ray() -> None:
    """Let modules that can work without Ray be imported as if it were not installed, until `show_ray`."""
    assert "ray" not in sys.modules
    if HIDDEN not in sys.meta_path:
        sys.meta_path.insert(0, HIDDEN)  # type: ignore[arg-type]


def show_ray() -> None:
    """Import Ray, and reimport the modules that were imported without it."""
    if HIDDEN in sys.meta_path:
        sys.meta_path.remove(HIDDEN)  # type: ignore[arg-type]
        if "vllm.v1.executor.ray_utils" in sys.modules:
            importlib.reload(sys.modules["vllm.v1.executor.ray_utils"])


def start() -> None:
    """Start the fork server. This process must have one thread and must not have loaded Ray; the server ends with
    it."""
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
    """Start the server for a process that has threads or Ray: the server is a new process, and preloads torch."""
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
    for name in ("torch", "ppoctl.engines.weights.bucket", "ppoctl.engines.megatron.process_group"):
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        print(_listen(listener), flush=True)
        serve(listener, parent)


def stand_in(name: str) -> None:
    """Let the server with this socket start workers."""
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
    """Fork a child for each request; end with the parent."""
    import ctypes

    assert "ray" not in sys.modules
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        channel, _ = listener.accept()
        with channel:
            if os.fork() == 0:
                listener.close()
                _become(channel)


def _become(channel: socket.socket) -> None:
    """Become the requested process; end with the interpreter."""
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
    """Send the command of a worker or an engine to the server; run any other command in this process."""
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
