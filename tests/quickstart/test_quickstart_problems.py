"""The committed questions: GSM8K's form, right answers, and no (template, numbers) pair on both sides."""

import itertools
import json
import re
from pathlib import Path

import problems
import pytest

WORDS = {**dict.fromkeys(problems.NAMES, "NAME"), **dict.fromkeys(problems.ITEMS, "ITEM")}


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (problems.HERE / name).read_text().splitlines()]


def pair(question: str) -> tuple[str, tuple[str, ...]]:
    """The (template, numbers) of a question, read off its text alone and not from the generator's own key."""
    skeleton = re.sub(r"[A-Za-z]+", lambda word: WORDS.get(word[0], word[0]), question)
    return re.sub(r"\d+", "#", skeleton), tuple(re.findall(r"\d+", question))


def test_held_out_shares_no_pair_with_ppo_training_or_pretraining() -> None:
    held_out = {pair(row["question"]) for row in read("test.jsonl")}
    trained_on = {pair(row["question"]) for row in read("train.jsonl")}
    pretrained_on = {pair(problem.question) for problem, _ in itertools.islice(problems.pretraining(), 5_000)}
    assert len({template for template, _ in held_out}) == len(problems.TEMPLATES)
    assert len({template for template, _ in pretrained_on}) == len(problems.TEMPLATES)
    assert not held_out & trained_on
    assert not held_out & pretrained_on


@pytest.mark.parametrize(("name", "count"), [("train.jsonl", 4000), ("test.jsonl", 400)])
def test_rows_are_gsm8k_rows_without_repeats(name: str, count: int) -> None:
    content = read(name)
    assert len(content) == len({row["question"] for row in content}) == count
    for row in content:
        assert set(row) == {"question", "answer"}
        assert re.fullmatch(r"(\d+[-+*/]\d+=\d+\n){1,2}#### [1-9]\d*", row["answer"])


def test_worked_steps_are_true_and_lead_to_the_number() -> None:
    for row in read("train.jsonl") + read("test.jsonl"):
        *steps, last = row["answer"].split("\n")
        for step in steps:
            left, op, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
            left, right, result = int(left), int(right), int(result)
            true = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[op]
            assert true == result, row
        assert last == "#### " + steps[-1].split("=")[1]


def test_committed_files_equal_generator_output(tmp_path: Path) -> None:
    problems.write_files(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (problems.HERE / name).read_bytes()


def test_pretraining_answers_are_right_less_than_half_of_the_time() -> None:
    written = list(itertools.islice(problems.pretraining(), 5_000))
    right = sum(text == problem.answer for problem, text in written) / len(written)
    assert 0.35 < right < 0.5
