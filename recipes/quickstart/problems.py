"""Seeded GSM8K-style word problems from templates, with a held-out split by (template, numbers).

A model with under a million parameters cannot read English, but it can learn ten sentence patterns and small sums, so
that a PPO run on two cores improves measurably within minutes. A hash of only the template and the numbers decides
whether a problem is held out, so no choice of names, items or seeds can leak a held-out problem.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAIN_ROWS, TEST_ROWS = 4000, 400
TRAIN_SEED, TEST_SEED, PRETRAIN_SEED = 11, 12, 13
HELD_OUT_PERCENT = 20
SLIP_SHARE = 0.10
SLIPS = (-10, -2, -1, 1, 2, 10)

NAMES = ("Tom", "Ana", "Ben", "Lily", "Max", "Mia", "Sam", "Nina", "Omar", "Rosa", "Ivan", "Jade")
ITEMS = ("apples", "pens", "books", "cards", "eggs", "coins", "shells", "stamps", "beads", "plums", "cups", "kites")


@dataclass(frozen=True)
class Template:
    """One sentence pattern. `ops` are the operations of the solution; `careful` is the fraction of right pretraining
    solutions.

    The first operation combines the first two numbers, each further one the last result and the next number.
    """

    name: str
    text: str
    ops: str
    careful: float


@dataclass(frozen=True)
class Problem:
    """A template with its values. The split depends on `key`."""

    template: Template
    numbers: tuple[int, ...]
    question: str

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        return self.template.name, self.numbers

    @property
    def answer(self) -> str:
        return worked(self.numbers, self.template.ops)


# `careful` is above one half for four templates and below for six, so the most likely answer is right for only four.
TEMPLATES = (
    Template("buys", "{n} has {a} {i} and buys {b} more. How many {i} does {n} have?", "+", 0.56),
    Template("days", "{n} found {a} {i} on Monday and {b} on Sunday. How many {i} did {n} find?", "+", 0.42),
    Template("gives", "{n} has {a} {i} and gives {b} to {m}. How many {i} does {n} keep?", "-", 0.56),
    Template("takes", "There are {a} {i} in a box. {n} takes {b} of them. How many {i} are left?", "-", 0.42),
    Template("bags", "{n} has {a} bags with {b} {i} in each bag. How many {i} does {n} have?", "*", 0.42),
    Template("price", "{n} sells {a} {i} for {b} dollars each. How many dollars does {n} get?", "*", 0.56),
    Template("share", "{n} shares {a} {i} equally among {b} friends. How many {i} does each friend get?", "/", 0.42),
    Template("packs", "{n} packs {a} {i} into bags of {b}. How many bags does {n} fill?", "/", 0.42),
    Template("trade", "{n} has {a} {i}, buys {b} more and gives away {c}. How many {i} are left?", "+-", 0.56),
    Template("extra", "{n} fills {a} bags with {b} {i} each and has {c} more. How many {i} is that?", "*+", 0.42),
)
CONFUSED_WITH = {"+": "-", "-": "+", "*": "+", "/": "-"}


def apply(op: str, left: int, right: int) -> tuple[str, int]:
    """Return one step as text and its result. A difference is larger minus smaller, so results are never negative."""
    if op == "-" and left < right:
        left, right = right, left
    compute = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[op]
    return f"{left}{op}{right}=", compute(left, right)


def worked(numbers: tuple[int, ...], ops: str, slip_at: int = -1, slip: int = 0) -> str:
    """Return the worked solution in GSM8K's format; `slip` is added to the result of step `slip_at`."""
    total, lines = numbers[0], []
    for index, (op, number) in enumerate(zip(ops, numbers[1:], strict=True)):
        step, total = apply(op, total, number)
        if index == slip_at:
            total = abs(total + slip)
        lines.append(f"{step}{total}")
    return "\n".join([*lines, f"#### {total}"])


def draw_numbers(ops: str, rng: random.Random) -> tuple[int, ...]:
    """Return random numbers for which the right result of every step is a whole number from 1 to 99."""
    if ops[0] in "*/":
        left, right = rng.randint(2, 9), rng.randint(2, 9)
        first = (left * right, right) if ops[0] == "/" else (left, right)
    elif ops[0] == "+":
        first = (rng.randint(2, 30), rng.randint(2, 20))
    else:
        left = rng.randint(5, 40)
        first = (left, rng.randint(2, min(20, left - 1)))
    if len(ops) == 1:
        return first
    return (*first, rng.randint(2, min(9, sum(first) - 1)))


def held_out(key: tuple[str, tuple[int, ...]]) -> bool:
    """Whether a (template, numbers) pair belongs to the test file; it depends only on the pair."""
    text = key[0] + ":" + ",".join(map(str, key[1]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def problems(seed: int, *, test: bool) -> Iterator[Problem]:
    """Yield an endless seeded stream from one side of the split, in rounds that use each template once, shuffled."""
    rng = random.Random(seed)
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
            yield draw(template, rng, test=test)


def draw(template: Template, rng: random.Random, *, test: bool) -> Problem:
    """Return a problem of one template; numbers are sampled until they are on the right side of the split."""
    while True:
        numbers = draw_numbers(template.ops, rng)
        name, other = rng.sample(NAMES, 2)
        fields = dict(zip("abc", numbers, strict=False))
        question = template.text.format(n=name, m=other, i=rng.choice(ITEMS), **fields)
        problem = Problem(template, numbers, question)
        if held_out(problem.key) == test:
            return problem


def careless_answer(problem: Problem, rng: random.Random) -> str:
    """Return a careless solution: often a wrong operation in the last step, sometimes a slip."""
    ops = problem.template.ops
    if rng.random() >= problem.template.careful:
        ops = ops[:-1] + CONFUSED_WITH[ops[-1]]
    if rng.random() >= SLIP_SHARE:
        return worked(problem.numbers, ops)
    return worked(problem.numbers, ops, rng.randrange(len(ops)), rng.choice(SLIPS))


def pretraining(seed: int = PRETRAIN_SEED) -> Iterator[tuple[Problem, str]]:
    """Yield the training text of the base model: problems that are not held out, with careless solutions."""
    rng = random.Random(seed + 1)
    for problem in problems(seed, test=False):
        yield problem, careless_answer(problem, rng)


def rows(count: int, seed: int, *, test: bool) -> list[dict[str, str]]:
    """Return `count` rows with distinct questions and right answers, in GSM8K's JSONL format."""
    found: dict[str, dict[str, str]] = {}
    stream = problems(seed, test=test)
    while len(found) < count:
        problem = next(stream)
        found.setdefault(problem.question, {"question": problem.question, "answer": problem.answer})
    return list(found.values())


def write_jsonl(path: Path, content: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in content), encoding="ascii")


def write_files(folder: Path) -> None:
    """Write train.jsonl (PPO prompts) and test.jsonl (held out)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows(TRAIN_ROWS, TRAIN_SEED, test=False))
    write_jsonl(folder / "test.jsonl", rows(TEST_ROWS, TEST_SEED, test=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the quickstart's train.jsonl and test.jsonl.")
    parser.add_argument("--out", type=Path, default=HERE)
    write_files(parser.parse_args().out)
