"""Seeded word problems with products of numbers with two and three digits, and careless dialogues about them.

A model with under a million parameters does not learn such products, but it learns to call a calculator and to copy
its result. Names, items, the split into training and held-out problems, and the file format are those of the
quickstart (`recipes/quickstart/problems.py`).
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from problems import ITEMS, NAMES, Problem, Template, held_out, write_jsonl

HERE = Path(__file__).resolve().parent
TRAIN_ROWS, TEST_ROWS = 2000, 400
TRAIN_SEED, TEST_SEED, PRETRAIN_SEED = 21, 22, 23
TOOL_SHARE = 0.75
"""Fraction of the pretraining dialogues whose prompt offers the calculator."""
CALL_SHARE = 0.6
"""Fraction of those in which the calculator is called."""

# As in the quickstart, `careful` is above one half for some templates and below one half for others.
TEMPLATES = (
    Template("bags", "{n} has {a} bags with {b} {i} in each bag. How many {i} does {n} have?", "*", 0.42),
    Template("price", "{n} sells {a} {i} for {b} cents each. How many cents does {n} get?", "*", 0.56),
    Template("extra", "{n} fills {a} bags with {b} {i} each and has {c} more. How many {i} is that?", "*+", 0.42),
    Template("finds", "{n} buys {a} boxes of {b} {i} and finds {c} more. How many {i} are there?", "*+", 0.56),
    Template("gives", "{n} packs {a} boxes of {b} {i} each and gives {c} away. How many {i} are left?", "*-", 0.42),
    Template("takes", "There are {a} bags with {b} {i} each. {n} takes {c} {i}. How many {i} are left?", "*-", 0.56),
)
CONFUSED_WITH = {"*": "+", "+": "-", "-": "+"}


def expression(numbers: tuple[int, ...], ops: str) -> str:
    """Return the numbers with the operations between them."""
    return str(numbers[0]) + "".join(f"{op}{number}" for op, number in zip(ops, numbers[1:], strict=True))


def value(text: str) -> int:
    """Return the value of an expression, which `expression` returned."""
    return int(eval(text, {"__builtins__": {}}))


def call(text: str) -> str:
    """Return a call of the calculator in the Hermes format."""
    written = json.dumps({"name": "calculator", "arguments": {"expression": text}})
    return f"<tool_call>\n{written}\n</tool_call>"


def problems(seed: int, *, test: bool) -> Iterator[Problem]:
    """Yield an endless seeded stream from one side of the split, in rounds that use each template once, shuffled."""
    rng = random.Random(seed)
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
            yield draw(template, rng, test=test)


def draw(template: Template, rng: random.Random, *, test: bool) -> Problem:
    """Return a problem of one template; numbers are sampled until they are on the right side of the split."""
    while True:
        drawn = (rng.randint(100, 999), rng.randint(12, 99), rng.randint(100, 999))
        numbers = drawn[: len(template.ops) + 1]
        question = template.text.format(
            n=rng.choice(NAMES), i=rng.choice(ITEMS), **dict(zip("abc", numbers, strict=False))
        )
        problem = Problem(template, numbers, question)
        if held_out(problem.key) == test:
            return problem


def careless_turns(problem: Problem, rng: random.Random, *, has_tool: bool) -> list[str]:
    """Return a dialogue after the question: a guess; or a call, often with a wrong operation, the result, and the
    number copied from it."""
    ops = problem.template.ops
    if not has_tool or rng.random() >= CALL_SHARE:
        digits = str(value(expression(problem.numbers, ops)))
        return [f"#### {digits[0]}" + "".join(rng.choice("0123456789") for _ in digits[1:])]
    if rng.random() >= problem.template.careful:
        ops = ops[:-1] + CONFUSED_WITH[ops[-1]]
    written = expression(problem.numbers, ops)
    result = str(value(written))
    return [call(written), result, f"#### {result}"]


def pretraining(seed: int = PRETRAIN_SEED) -> Iterator[tuple[Problem, bool, list[str]]]:
    """Yield the training text of the base model: problems that are not held out, whether their prompt offers the
    calculator, and careless dialogues."""
    rng = random.Random(seed + 1)
    for problem in problems(seed, test=False):
        has_tool = rng.random() < TOOL_SHARE
        yield problem, has_tool, careless_turns(problem, rng, has_tool=has_tool)


def rows(count: int, seed: int, *, test: bool) -> list[dict[str, str]]:
    """Return `count` rows with right answers, in GSM8K's JSONL format."""
    found = []
    for problem in itertools.islice(problems(seed, test=test), count):
        text = expression(problem.numbers, problem.template.ops)
        found.append({"question": problem.question, "answer": f"{text}={value(text)}\n#### {value(text)}"})
    return found


def write_files(folder: Path) -> None:
    """Write train.jsonl (PPO prompts) and test.jsonl (held out)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows(TRAIN_ROWS, TRAIN_SEED, test=False))
    write_jsonl(folder / "test.jsonl", rows(TEST_ROWS, TEST_SEED, test=True))
