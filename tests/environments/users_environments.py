"""Environments of a user, correct and faulty. Only processes of environments import them."""

import asyncio
import os
import time
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
        return Observation((Message("user", text),), self.turns / 4, self.turns == self.most, {"turns": self.turns})

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


def pid_of_process(row: Any) -> None:
    """Write the process id where the row asks for it."""
    with open(row.fields["note"], "a") as file:
        file.write(f"{os.getpid()}\n")


class Misbehaves:
    """Does what the text of the turn names; otherwise, it answers with the texts so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def open(self, row: Any, seed: int) -> Any:
        if "note" in row.fields:
            pid_of_process(row)
        self.row = row
        return self.act(row.truth or "")

    def step(self, turn: Turn) -> Any:
        return self.act(turn.text)

    def act(self, text: str) -> Any:
        self.texts.append(text)
        name, _, detail = text.partition(" ")
        if name in MISDEEDS:
            return MISDEEDS[name](detail)
        return [{"role": "user", "content": "|".join(self.texts)}]


def _hang(detail: str) -> None:
    while True:
        time.sleep(0.01)


MISDEEDS: dict[str, Any] = {"hang": _hang}
