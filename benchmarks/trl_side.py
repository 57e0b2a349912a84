"""TRL's half of `vs_trl.py`: timed PPO steps of TRL 1.12.0 on the job in a JSON file. Runs in TRL's environment.

    python benchmarks/trl_side.py JOB_JSON RESULT_JSON

The first step is a warm-up and is not in the result.
"""

import json
import sys
import time
import types
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from cpu_time import cpu_seconds_with_children
from datasets import Dataset
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
    set_seed,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


class TokenIds(torch.nn.Module):
    """A "backbone" that returns the token ids as hidden states, with -1 for padding."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(hidden_states=[input_ids.where(attention_mask, -1)])


class ShareOfLetter(torch.nn.Module):
    """The rule reward; TRL accepts only a module with `base_model_prefix` and `score`. Also counts tokens."""

    base_model_prefix = "backbone"

    def __init__(self, letter_id: int, response_tokens: int) -> None:
        super().__init__()
        self.backbone = TokenIds()
        self.letter_id = letter_id
        self.response_tokens = response_tokens
        self.prompt_columns = 0
        self.tokens: list[int] = []

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the letter's fraction of a complete response, equal at each position."""
        response = ids[:, self.prompt_columns :]
        self.tokens.append(int((response >= 0).sum()))
        hits = (response == self.letter_id).float().sum(1) / self.response_tokens
        return hits[:, None, None].expand(-1, ids.shape[1], 1)


@dataclass
class Clock(TrainerCallback):
    """End times of each step, in wall and CPU seconds of all processes, and the seconds of its generation."""

    ends: list[tuple[float, float]] = field(default_factory=list)
    generation_s: list[float] = field(default_factory=list)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), cpu_seconds_with_children()))

    def watch_generation(self, reward: ShareOfLetter) -> None:
        """Time TRL's `batch_generation`, which a step calls once; the reward receives the width of the prompts."""
        generate = ppo_trainer.batch_generation

        def timed(policy: Any, queries: torch.Tensor, *args: Any) -> Any:
            reward.prompt_columns = queries.shape[1]
            start = time.perf_counter()
            generated = generate(policy, queries, *args)
            self.generation_s.append(time.perf_counter() - start)
            return generated

        ppo_trainer.batch_generation = timed


def settings(job: dict[str, Any], stop: int | None, folder: Path) -> PPOConfig:
    return PPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=job["microbatch"],
        gradient_accumulation_steps=job["batch"] // job["microbatch"],
        num_mini_batches=1,
        num_ppo_epochs=job["epochs"],
        total_episodes=job["batch"] * job["steps"],
        local_rollout_forward_batch_size=job["batch"],
        response_length=job["response_tokens"],
        temperature=1.0,
        kl_coef=job["kl_coef"],
        gamma=1.0,
        lam=job["gae_lambda"],
        cliprange_value=job["value_clip"],
        vf_coef=0.1,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        num_sample_generations=0,
        stop_token_id=stop,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        seed=0,
        disable_tqdm=True,
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    result = Path(sys.argv[2])
    torch.set_num_threads(job["threads"])
    set_seed(0)
    dtype = getattr(torch, job["dtype"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    policy, reference = (Qwen2ForCausalLM.from_pretrained(job["model"], dtype=dtype) for _ in range(2))
    critic = Qwen2ForSequenceClassification.from_pretrained(job["model"], dtype=dtype, num_labels=1)
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text("utf-8").splitlines()]
    data = Dataset.from_list([{"input_ids": tokenizer(row["prompt"])["input_ids"]} for row in rows])
    stop = tokenizer.convert_tokens_to_ids("<end>") if job["ragged"] else None
    clock, reward = Clock(), ShareOfLetter(tokenizer.convert_tokens_to_ids("a"), job["response_tokens"])
    clock.watch_generation(reward)
    trainer = PPOTrainer(
        args=settings(job, stop, result.parent / "trl"),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        value_model=critic,
        reward_model=reward,
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        callbacks=[clock],
    )
    trainer.train()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(clock.ends)]
    logged = [line for line in trainer.state.log_history if "objective/scores" in line]
    result.write_text(
        json.dumps(
            {
                "step_s": [wall for wall, _ in steps],
                "cpu_s": [cpu for _, cpu in steps],
                "tokens": reward.tokens[1:],
                "stages": {"generation": clock.generation_s[1:]},
                "scores": [line["objective/scores"] for line in logged],
                "versions": {
                    "trl": trl.__version__,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                },
            }
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
