"""Seconds that a stop takes in each wait of docs/waits.md that one machine can provoke.

    python benchmarks/stops.py NAME...     or `names`, which prints all names

A row is the wait, the signal, the seconds until the command has ended, its exit code, and the first line that it
printed after the signal.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "recipes" / "quickstart.toml")
READY_S, GIVE_UP_S = 180.0, 90.0
HANGS = """\
import time
{head}
def score(sample):
    if {when}:
        open("here", "w").close()
{then}
    return 1.0
"""


@dataclass
class Slow:
    """A service that answers its first requests with 1, and then sends a space every 0.2 s."""

    answers: int
    hangs: threading.Event = field(default_factory=threading.Event)

    def serve(self, connection: socket.socket) -> None:
        with connection:
            request = connection.recv(1 << 20)
            self.answers -= 1
            if self.answers >= 0:
                head, _, body = request.partition(b"\r\n\r\n")
                length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if b"Content-Length" in line))
                while len(body) < length:
                    body += connection.recv(1 << 20)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n1")
                return
            self.hangs.set()
            try:
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.2)
            except OSError:
                return


@contextmanager
def slow(answers: int) -> Iterator[tuple[str, Slow]]:
    service = Slow(answers)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=service.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", service


@contextmanager
def shut() -> Iterator[str]:
    """Return a port whose connection queue is full, so that connecting to it blocks."""
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@dataclass
class Wait:
    """One wait: words of the command, and the condition for its begin."""

    words: list[str]
    has_begun: Callable[[str], bool]
    numbers: tuple[int, ...] = (signal.SIGTERM,)


def train(*sets: str) -> list[str]:
    return ["train", RECIPE, "--runs", "runs", *(word for each in sets for word in ("--set", each))]


def begin(*sets: str) -> list[str]:
    """Start a command that is stopped before engines start: with two engines none is prestarted."""
    return train("generator.engines=2", *sets)


def after(seconds: float) -> Callable[[str], bool]:
    began = time.monotonic()
    return lambda _: time.monotonic() - began > seconds


def http(address: str) -> str:
    return f'reward={{kind="http",url="http://{address}/score",try_timeout_s=600.0}}'


def python(then: str, *, head: str = "", when: str = "True") -> str:
    Path("rw.py").write_text(HANGS.format(head=head, when=when, then=then))
    return f'reward={{kind="python",function="{Path("rw.py").absolute()}:score",timeout_s=600.0}}'


SLEEPS = "        time.sleep(600)"
DAEMON = """\
        import os
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        time.sleep(600)"""


def code(address: str) -> tuple[str, str]:
    truth = json.dumps({"inputs": [""], "outputs": ["2"]})
    rows = [json.dumps({"p": f"Print 2. ({number})", "t": truth}) for number in range(256)]
    Path("code.jsonl").write_text("\n".join(rows))
    data = f'data.train={{format="columns",path="{Path("code.jsonl").absolute()}",prompt="p",answer="t"}}'
    return data, f'reward={{kind="code",sandbox="fusion",url="http://{address}/run",timeout_s=300.0}}'


def program(name: str) -> None:
    """Create a Slurm program that never answers."""
    Path("bin").mkdir(exist_ok=True)
    Path("bin", name).write_text("#!/bin/sh\ntouch here\nexec sleep 600\n")
    Path("bin", name).chmod(0o755)


@contextmanager
def waits(name: str) -> Iterator[Wait]:
    here = lambda _: Path("here").exists()  # noqa: E731
    both = (signal.SIGTERM, signal.SIGINT)
    with (
        slow(8 if name == "service in a stage" else 0) as (address, service),
        shut() as full,
    ):
        hangs = lambda _: service.hangs.is_set()  # noqa: E731
        table: dict[str, Callable[[], Wait]] = {
            "validate --reward": lambda: Wait(
                ["validate", RECIPE, "--reward", "--set", http(address)], hangs, both
            ),
            "service at the start": lambda: Wait(begin(http(address)), hangs, both),
            "service that accepts no connection": lambda: Wait(begin(http(full)), after(40)),
            "service that is down": lambda: Wait(begin(http("127.0.0.1:9")), after(40)),
            "endpoint of programs": lambda: Wait(begin(*code(address)), hangs),
            "scorer that hangs": lambda: Wait(begin(python(SLEEPS)), here, both),
            "scorer that hangs and left a daemon": lambda: Wait(begin(python(DAEMON)), here),
            "scorer that imports": lambda: Wait(
                begin(python("        pass", head="open('here', 'w').close(); time.sleep(600)")), here
            ),
            "rows in a pipe": lambda: Wait(begin("data.train.path=rows.jsonl"), after(30)),
            "doctor and a slow MLflow": lambda: Wait(
                ["doctor", RECIPE, "--set", f'tracking={{kind="mlflow",uri="http://{address}"}}'], hangs
            ),
            "sbatch": lambda: Wait([*train(), "--on", "slurm"], here, both),
            "start of vLLM": lambda: Wait(train(), lambda screen: "starting vLLM" in screen),
            "update": lambda: Wait(train(), lambda screen: "step 1" in screen),
            "service in a stage": lambda: Wait(train(http(address)), hangs, both),
            "scorer in a stage": lambda: Wait(
                train(python(SLEEPS, when="sample.response not in ('', 'The answer is 42.')")), here
            ),
            "MLflow in training": lambda: Wait(
                train(f'tracking={{kind="mlflow",uri="http://{address}"}}'), hangs
            ),
            "start of Ray": lambda: Wait(train("generator.engines=2"), lambda screen: "start" in screen),
            "a Ray that does not answer": lambda: Wait(
                train("generator.engines=2", f"cluster.ray_address={address}"), hangs
            ),
            "a reader that does not read": lambda: Wait(["recipes", "keys"], after(8)),
        }  # fmt: skip
        if name == "names":
            print("\n".join(table))
            raise SystemExit
        yield table[name]()


def measured(name: str) -> None:
    for index in range(2):
        with tempfile.TemporaryDirectory() as folder, waits_in(folder, name) as wait:
            if index >= len(wait.numbers):
                return
            number = wait.numbers[index]
            seconds, code, line = stop(wait, number, reads=name != "a reader that does not read")
            print(f"| {name} | {signal.Signals(number).name} | {seconds} | {code} | {line} |", flush=True)


@contextmanager
def waits_in(folder: str, name: str) -> Iterator[Wait]:
    before = Path.cwd()
    os.chdir(folder)
    os.mkfifo("rows.jsonl")
    for each in ("squeue", "sbatch", "sinfo", "scontrol", "sacct"):
        if name == "sbatch":
            program(each)
    try:
        with waits(name) as wait:
            yield wait
    finally:
        os.chdir(before)


def stop(wait: Wait, number: int, *, reads: bool) -> tuple[str, str, str]:
    environ = {**os.environ, "PATH": f"{Path('bin').absolute()}:{os.environ['PATH']}"}
    lines: list[tuple[float, str]] = []
    command = subprocess.Popen(
        [sys.executable, "-m", "ppoctl", *wait.words], stdin=subprocess.PIPE, text=True, env=environ,
        stdout=subprocess.DEVNULL if reads else subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip

    def read() -> None:
        assert command.stderr is not None
        for line in command.stderr:
            lines.append((time.monotonic(), line.rstrip()))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    limit = time.monotonic() + READY_S
    while not wait.has_begun("\n".join(line for _, line in lines)) and command.poll() is None:
        if time.monotonic() > limit:
            break
        time.sleep(0.05)
    if command.poll() is not None:
        return "-", f"ended before with {command.returncode}", lines[-1][1] if lines else ""
    time.sleep(1.5)
    began = time.monotonic()
    command.send_signal(number)
    try:
        command.wait(GIVE_UP_S)
        seconds = f"{time.monotonic() - began:.2f}"
    except subprocess.TimeoutExpired:
        seconds = f"over {GIVE_UP_S:g}"
        command.kill()
        command.wait()
    thread.join(5)
    screen = [f"{at - began:.1f} s: {line}" for at, line in lines if at >= began and line]
    return seconds, str(command.returncode), screen[0] if screen else "nothing"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell, and inherited
    for each in sys.argv[1:]:
        measured(each)
