"""Create the quickstart's base model, tokenizer and data, in a few minutes on two cores.

The model is deliberately half-trained. Its pretraining text has careless solutions (`careless_answer`), with the
wrong operation in about half of the problems and an occasional slip in a result, and training stops after a fixed
number of batches. The model therefore knows the format and the arithmetic, but is uncertain which operation a problem
requires. The right answer is among its samples for nearly every problem, as PPO requires, but in half of the samples
or fewer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import problems
import tokenizer
import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

MODEL_SEED = 7
BATCHES, BATCH, PEAK_LR, WARMUP = 1500, 64, 2.5e-3, 50
MAX_NEW_TOKENS = 40
FORMAT = re.compile(r"#### (-?[0-9.,]+)")
Text = list[tuple[list[int], bool]]
"""Ids of a training text in parts, each with whether the model writes it."""


@dataclass(frozen=True)
class Report:
    """Quality of the sampled and greedy answers to the held-out problems."""

    format_share: float
    sampled: float
    pass_at_8: float
    greedy: float


def config(vocab_size: int, eos: int, pad: int) -> Qwen2Config:
    """Return a Qwen2 with under a million parameters, grouped-query attention and tied embeddings."""
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )


def prompt_ids(fast: PreTrainedTokenizerBase, question: str) -> list[int]:
    message = [{"role": "user", "content": question}]
    return fast.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def texts(fast: PreTrainedTokenizerBase) -> Iterator[Text]:
    """Yield an endless stream of questions with careless answers."""
    for problem, answer in problems.pretraining():
        yield [(prompt_ids(fast, problem.question), False), (fast(answer)["input_ids"] + [fast.eos_token_id], True)]


def padded(batch: Sequence[Text], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids and labels; the loss covers only the parts that the model writes."""
    width = max(sum(len(ids) for ids, _ in text) for text in batch)
    ids = torch.full((len(batch), width), pad)
    labels = torch.full((len(batch), width), -100)
    for row, text in enumerate(batch):
        start = 0
        for part, is_written in text:
            end = start + len(part)
            ids[row, start:end] = torch.tensor(part)
            if is_written:
                labels[row, start:end] = ids[row, start:end]
            start = end
    return ids, labels


def train(fast: PreTrainedTokenizerBase, stream: Iterator[Text], count: int) -> Qwen2ForCausalLM:
    """Train for `count` batches from a seeded initialization, with linear warm-up and decay, and return the model."""
    torch.manual_seed(MODEL_SEED)
    model = Qwen2ForCausalLM(config(len(fast), fast.eos_token_id, fast.pad_token_id))
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(count):
        ids, labels = padded(list(itertools.islice(stream, BATCH)), fast.pad_token_id)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / WARMUP, (count - step) / count)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step + 1 == count:
            print(f"batch {step:5d}  loss {loss.item():.4f}  {time.monotonic() - began:6.1f} s", flush=True)
    return model.eval()


@torch.no_grad()
def respond(
    model: Qwen2ForCausalLM,
    fast: PreTrainedTokenizerBase,
    questions: list[str],
    *,
    samples: int,
    greedy: bool = False,
) -> list[str]:
    """Return `samples` responses to each question; the responses to one question are adjacent."""
    message = [fast.decode(prompt_ids(fast, question)) for question in questions]
    inputs = fast(message, return_tensors="pt", padding=True, padding_side="left")
    generation = GenerationConfig(
        do_sample=not greedy,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=samples,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    out = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], generation_config=generation)
    return fast.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_right(response: str, answer: str) -> bool:
    """Whether a response is right by the strict GSM8K rule: its last `#### number` equals the answer without
    commas."""
    found = FORMAT.findall(response)
    return bool(found) and found[-1].replace(",", "") == answer.rsplit("#### ", 1)[1].replace(",", "")


def measure(model: Qwen2ForCausalLM, fast: PreTrainedTokenizerBase, rows: list[dict[str, str]]) -> Report:
    """Return the fraction with the right format, sampled accuracy, pass@8 (all at temperature 1), greedy accuracy."""
    torch.manual_seed(MODEL_SEED)
    samples, greedy = [], []
    for start in range(0, len(rows), 50):
        questions = [row["question"] for row in rows[start : start + 50]]
        samples += respond(model, fast, questions, samples=8)
        greedy += respond(model, fast, questions, samples=1, greedy=True)
    right = [is_right(text, rows[index // 8]["answer"]) for index, text in enumerate(samples)]
    solved = [any(right[index * 8 : index * 8 + 8]) for index in range(len(rows))]
    right_greedy = [is_right(text, row["answer"]) for text, row in zip(greedy, rows, strict=True)]
    written = sum(bool(FORMAT.search(text)) for text in samples)
    return Report(
        written / len(samples), sum(right) / len(right), sum(solved) / len(rows), sum(right_greedy) / len(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model, tokenizer and data.")
    parser.add_argument("--out", type=Path, default=problems.HERE, help="folder for model/, train.jsonl, test.jsonl")
    parser.add_argument("--batches", type=int, default=BATCHES)
    options = parser.parse_args()
    torch.set_num_threads(2)
    problems.write_files(options.out)
    fast = tokenizer.save(options.out / "model")
    model = train(fast, texts(fast), options.batches)
    model.generation_config = GenerationConfig(eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    model.save_pretrained(options.out / "model")
    rows = [json.loads(line) for line in (options.out / "test.jsonl").read_text().splitlines()]
    report = measure(model, fast, rows)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters")
    print(f"format {report.format_share:.3f}  sampled {report.sampled:.3f}  pass@8 {report.pass_at_8:.3f}", end="")
    print(f"  greedy {report.greedy:.3f}")


if __name__ == "__main__":
    main()
