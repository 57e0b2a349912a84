"""The committed files of own/calculator-small: problems with right answers that no split shares; a tokenizer with the
tags of tool calls; a model that calls the calculator in about half of its samples."""

import itertools
import json
import re
from pathlib import Path

import calculator_problems
import calculator_tokenizer
import make_calculator
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = calculator_problems.HERE
FAST = AutoTokenizer.from_pretrained(FOLDER / "model")
CALLED = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "348*57-120"}}\n</tool_call>'


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def numbers(question: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", question))


def test_committed_rows_and_tokenizer_equal_script_output(tmp_path: Path) -> None:
    calculator_problems.write_files(tmp_path)
    calculator_tokenizer.save(tmp_path / "model")
    for name in ("train.jsonl", "test.jsonl", "model/tokenizer.json", "model/chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_answers_are_true_products_with_sums_and_differences() -> None:
    for row in read("train.jsonl") + read("test.jsonl"):
        a, b, op, c, result = re.fullmatch(r"(\d+)\*(\d+)(?:([+-])(\d+))?=(\d+)\n#### \5", row["answer"]).groups()
        signed = {None: 0, "+": 1, "-": -1}[op] * int(c or 0)
        assert int(a) * int(b) + signed == int(result) > 999
        assert numbers(row["question"]) == tuple(each for each in (a, b, c) if each)


def test_held_out_numbers_are_in_no_other_text() -> None:
    # Two templates with the same numbers are different problems, so a pair of template and numbers is compared.
    held_out = {(row["question"].split()[1], numbers(row["question"])) for row in read("test.jsonl")}
    pretrained = (problem.question for problem, _, _ in itertools.islice(calculator_problems.pretraining(), 5_000))
    trained = (row["question"] for row in read("train.jsonl"))
    others = {(text.split()[1], numbers(text)) for text in (*pretrained, *trained)}
    assert len(held_out) > 390
    assert not held_out & others


def test_pretraining_text_has_guesses_and_calls_of_which_half_are_right() -> None:
    texts = list(itertools.islice(calculator_problems.pretraining(), 6_000))
    with_tool = [(problem, turns) for problem, has_tool, turns in texts if has_tool]
    assert 0.72 < len(with_tool) / len(texts) < 0.78
    assert all(len(turns) == 1 for _, has_tool, turns in texts if not has_tool)
    right = [turns[-1] == problem.answer.split("\n")[-1] for problem, turns in with_tool if len(turns) == 3]
    assert 0.57 < len(right) / len(with_tool) < 0.63
    guessed = [turns[0] for _, _, turns in texts if len(turns) == 1]
    assert all(re.fullmatch(r"#### [1-9]\d{3,4}", text) for text in guessed)


def test_tags_are_single_tokens_of_the_text_and_calls_are_short() -> None:
    ids = FAST(CALLED)["input_ids"]
    assert FAST.decode(ids, skip_special_tokens=True) == CALLED
    assert [FAST.convert_ids_to_tokens(ids)[at] for at in (0, -1)] == ["<tool_call>", "</tool_call>"]
    assert len(ids) < 40
    assert FAST("348")["input_ids"] == [FAST.convert_tokens_to_ids(digit) for digit in "348"]
    assert len(FAST) == calculator_tokenizer.VOCAB_SIZE


def test_template_writes_tools_and_results() -> None:
    messages = [
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    text = FAST.apply_chat_template(messages, tools=make_calculator.TOOLS, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Tools: calculator<|user|>2?<|assistant|>a<|eos|>"
        "<|user|><tool_response>\n7\n</tool_response><tool_response>\n8\n</tool_response><|assistant|>"
    )


@pytest.fixture(scope="module")
def reports() -> tuple[make_calculator.Report, make_calculator.Report]:
    """Answers with a calculator, and without it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32).eval()
    rows = read("test.jsonl")[:100]
    found = tuple(make_calculator.measure(model, FAST, rows, tool) for tool in (True, False))
    torch.set_num_threads(threads)
    return found


def test_model_calls_the_calculator_in_half_of_its_samples_and_copies_results(
    reports: tuple[make_calculator.Report, make_calculator.Report],
) -> None:
    with_tool, without = reports
    assert 0.4 < with_tool.called < 0.8
    assert with_tool.copied > 0.9
    assert 0.15 < with_tool.right < 0.45
    assert without.right < 0.05


def test_committed_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 4_000_000
