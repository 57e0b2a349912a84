"""Environments of a user, correct and faulty. Only processes of environments import them."""

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppoctl.environments.api import Message, Observation, Turn


class Counts:
    """Answers each turn with the number of turns so far, and ends after `most` turns."""

    def __init__(self, most: int = 3) -> None:
        self.most = most

    def open(self, row: Any, seed: int) -> str:
        self.turns, self.total = 0, seed
        return f"row {row.id}, truth {row.truth}, level {row.fields['level']}, seed {seed}, {row.messages[0].content}"

    def step(self, turn: Turn) -> Observation:
        self.turns += 1
        self.total += len(turn.text)
        text = f"turn {self.turns}, total {self.total}, tokens {turn.tokens}, calls {len(turn.calls)}"
        return Observation((Message("user", text),), self.turns / 4, self.turns == self.most, {"answers": self.turns})

    def close(self) -> None:
        print(f"closed after {self.turns}", flush=True)


class WaitsAsync:
    """Async methods that share one event loop: the task that `open` starts runs during `step`."""

    async def open(self, row: Any, seed: int) -> None:
        self.done = asyncio.Event()
        self.task = asyncio.ensure_future(self.later())

    async def later(self) -> None:
        await asyncio.sleep(0.01)
        self.done.set()

    async def step(self, turn: Turn) -> dict[str, Any]:
        await self.done.wait()
        return {"reward": 2, "done": True}


async def guessing(row: Any, seed: int, ask: Any, *, low: str = "too low") -> float:
    """Number guessing: the row's truth is the number."""
    turn = await ask(f"guess, seed {seed}")
    for _ in range(5):
        if turn.text == row.truth:
            return 1.0
        turn = await ask(low, reward=-0.25, metrics={"guesses": 1})
    return 0.0


class Misbehaves:
    """Does what the text of the turn names; otherwise, it answers with the texts so far."""

    def open(self, row: Any, seed: int) -> Any:
        self.texts: list[str] = []
        if "opened" in row.fields:
            with Path(row.fields["opened"]).open("a") as file:
                file.write(f"{row.id} {os.getpid()}\n")
        return self.act(row.truth or "")

    def step(self, turn: Turn) -> Any:
        return self.act(turn.text)

    def close(self) -> None:
        name, _, detail = self.texts[-1].partition(" ")
        if name == "closing":
            MISDEEDS[detail]("")

    def act(self, text: str) -> Any:
        self.texts.append(text)
        name, _, detail = text.partition(" ")
        if name in MISDEEDS:
            return MISDEEDS[name](detail)
        return [{"role": "user", "content": "|".join(self.texts)}]


def _hang(detail: str) -> None:
    while True:
        time.sleep(0.01)


def _hang_in_c(detail: str) -> None:
    """Hang in C code that holds the interpreter lock."""
    while True:
        ctypes.PyDLL(None).sleep(600)


def _write_into_pipes(detail: str) -> str:
    """Write into each descriptor that the process has, also into the private pipe to its parent."""
    for number in range(3, 20):
        with suppress(OSError):
            os.write(number, detail.encode() + b"\n")
    return "written"


def _ten_mib_into_pipes(detail: str) -> str:
    return _write_into_pipes("9" * 10 * 2**20)


def _counted(detail: str) -> str:
    """Answer with the number of calls so far, which the file `detail` has, and raise the number."""
    path = Path(detail)
    path.write_text(path.read_text() + "x")
    return f"called {len(path.read_text())} times, " + "a" * 200


def _print_much(detail: str) -> str:
    for _ in range(100):
        print("x" * 10**4)
    return "printed"


def _fork(detail: str) -> str:
    os.fork()
    return "forked"


def _raise(detail: str) -> None:
    raise LookupError(detail)


MISDEEDS: dict[str, Any] = {
    "hang": _hang,
    "hang-in-c": _hang_in_c,
    "sleep": lambda detail: time.sleep(float(detail)) or "slept",
    "sys.exit": lambda detail: sys.exit(3),
    "os._exit": lambda detail: os._exit(3),
    "kill": lambda detail: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "fork": _fork,
    "pipes": _write_into_pipes,
    "large-pipes": _ten_mib_into_pipes,
    "print": _print_much,
    "counted": _counted,
    "10MB": lambda detail: "x" * 10**7,
    "metrics": lambda detail: {"messages": "m", "metrics": {"at": time.monotonic()}},
    "nothing": lambda detail: None,
    "number": lambda detail: 1.0,
    "bytes": lambda detail: b"\xff\xfe",
    "bytes-content": lambda detail: [{"role": "user", "content": b"\xff"}],
    "surrogate": lambda detail: "half \udc80",
    "nan": lambda detail: {"reward": float("nan"), "done": True},
    "too-large-reward": lambda detail: Observation(reward=1e39, done=True),
    "text-reward": lambda detail: {"reward": "1", "done": True},
    "done": lambda detail: {"reward": np_like(0.5), "done": np_like(True)},
    "number-done": lambda detail: {"done": 1},
    "unknown-key": lambda detail: {"observation": "x"},
    "empty": lambda detail: (),
    "assistant": lambda detail: [Message("assistant", "the answer is 7")],
    "no-content": lambda detail: [{"role": "user"}],
    "tool-id": lambda detail: [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    "messages": lambda detail: [Message("user", "m"), {"role": "tool", "content": "t"}],
    "bad-metric": lambda detail: {"done": True, "metrics": {"a b": 1}},
    "nan-metric": lambda detail: {"done": True, "metrics": {"a": float("inf")}},
    "taken-metric": lambda detail: {"done": True, "metrics": {"a": 1, "calls": 2}},
    "metrics-list": lambda detail: {"done": True, "metrics": [1]},
}


class np_like:  # noqa: N801 - like numpy's scalar types
    """A number in a scalar of an array library."""

    def __init__(self, value: float) -> None:
        self.value = value

    def item(self) -> float:
        return self.value


async def asks_twice_at_once(row: Any, seed: int, ask: Any) -> None:
    await ask("first")
    await asyncio.gather(ask("second"), ask("third"))


async def returns_at_once(row: Any, seed: int, ask: Any) -> float:
    return 1.0


async def returns_text(row: Any, seed: int, ask: Any) -> str:
    await ask()
    return "1.0"


async def exits(row: Any, seed: int, ask: Any) -> None:
    if row.truth == "exit":
        sys.exit(3)
    await ask()


def not_async(row: Any, seed: int, ask: Any) -> None:
    pass


class WithoutStep:
    def open(self, row: Any, seed: int) -> None:
        pass


def look(direction: str) -> str:
    """Look around."""
    return direction


class WithTools:
    """An environment that offers tools, as a function and as a schema."""

    tools = (look, {"type": "function", "function": {"name": "go"}})

    def open(self, row: Any, seed: int) -> None:
        pass

    def step(self, turn: Turn) -> str:
        return f"{turn.calls[0].name} {turn.calls[0].arguments}"
