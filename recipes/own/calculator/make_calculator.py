"""Create the model, tokenizer and data of own/calculator-small, in a few minutes on two cores.

The model is half-trained, as the quickstart's is: its pretraining text has guessed answers and calls of the
calculator, about half of them with a wrong operation (`calculator_problems`). PPO has to learn to call the calculator
always, with the operation that the question requires. The text also has questions without a calculator; their answers
are guessed.

    PYTHONPATH=recipes/quickstart python recipes/own/calculator/make_calculator.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import calculator_problems
import calculator_tokenizer
import make_model
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2ForCausalLM

BATCHES = 800
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
EXPRESSION = re.compile(
    r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "([1-9]\d*([*+-][1-9]\d*)+)"'
)
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Report:
    """Quality of the sampled answers to the held-out problems."""

    called: float
    """Fraction that calls the calculator."""
    copied: float
    """Fraction of the calls after which the answer is the result."""
    right: float
    """Fraction of right answers."""


def rendered(fast: PreTrainedTokenizerBase, messages: Messages, *, has_tool: bool) -> list[int]:
    """Return the ids of a dialogue up to the start of the next turn."""
    tools = TOOLS if has_tool else None
    return fast.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def texts(fast: PreTrainedTokenizerBase) -> Iterator[make_model.Text]:
    """Yield an endless stream of careless dialogues."""
    for problem, has_tool, turns in calculator_problems.pretraining():
        messages: Messages = []
        text: make_model.Text = []
        roles = ("user", "assistant", "tool", "assistant")
        for role, content in zip(roles, (problem.question, *turns), strict=False):
            messages.append({"role": role, "content": content})
            if role == "assistant":
                text.append((fast(content)["input_ids"] + [fast.eos_token_id], True))
            else:
                read = sum(len(ids) for ids, _ in text)
                text.append((rendered(fast, messages, has_tool=has_tool)[read:], False))
        yield text


@torch.no_grad()
def sampled(model: Qwen2ForCausalLM, fast: PreTrainedTokenizerBase, prompts: list[list[int]]) -> list[str]:
    """Return a response to each prompt, sampled at temperature 1."""
    inputs = fast.pad([{"input_ids": ids} for ids in prompts], return_tensors="pt", padding_side="left")
    generation = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=64,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    out = model.generate(**inputs, generation_config=generation)
    return fast.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def measure(model: Qwen2ForCausalLM, fast: PreTrainedTokenizerBase, rows: list[dict[str, str]], tool: bool) -> Report:
    """Sample one answer to each question, with a calculator or without it."""
    torch.manual_seed(make_model.MODEL_SEED)
    dialogues = [[{"role": "user", "content": row["question"]}] for row in rows]
    first = sampled(model, fast, [rendered(fast, messages, has_tool=tool) for messages in dialogues])
    answers = dict(enumerate(first))
    calls = {index: found[1] for index, text in answers.items() if (found := EXPRESSION.search(text))}
    results = {index: str(calculator_problems.value(text)) for index, text in calls.items()}
    for index, result in results.items():
        dialogues[index] += [{"role": "assistant", "content": first[index]}, {"role": "tool", "content": result}]
    if calls and tool:
        second = sampled(model, fast, [rendered(fast, dialogues[index], has_tool=True) for index in calls])
        answers |= dict(zip(calls, second, strict=True))
    copied = sum(answers[index] == f"#### {result}" for index, result in results.items())
    right = sum(make_model.is_right(answers[index], row["answer"]) for index, row in enumerate(rows))
    return Report(len(calls) / len(rows), copied / max(1, len(calls)), right / len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model, tokenizer and data of own/calculator-small.")
    parser.add_argument("--out", type=Path, default=calculator_problems.HERE, help="folder for model/ and the rows")
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args()
    calculator_problems.write_files(options.out)
    fast = calculator_tokenizer.save(options.out / "model")
    model = make_model.train(fast, texts(fast), options.batches)
    model.generation_config = GenerationConfig(eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    model.save_pretrained(options.out / "model")
    lines = (options.out / "test.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in itertools.islice(lines, 200)]
    print("with the calculator", measure(model, fast, rows, True))
    print("without it", measure(model, fast, rows, False))


if __name__ == "__main__":
    main()
