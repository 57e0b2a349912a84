"""80-eval: how good the actor is on held-out prompts. The one evaluation path, of `train` and `ppoctl eval` alike."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl import metrics
from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import Evaluation, Record, State
from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.batch.seeds import derive_seed
from ppoctl.ports import Generator, Sample, SampleRequest, SamplingParams, Scorer
from ppoctl.stages.reward import score_all


@dataclass(frozen=True)
class EvaluateStage:
    """Greedy and sampled pass@1 with standard error on every evaluation set."""

    generator: Generator
    scorer: Scorer
    sets: Mapping[str, Prompts]
    sampled: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    between: Callable[[], None]
    """Called while scores are waited for; raises when the job is to stop."""
    name: str = "eval"

    def run(self, actor: State) -> Evaluation:
        summary: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        for name, prompts in self.sets.items():
            for mode, params, count in self._passes():
                drawn = self._draw(prompts, params, at=actor, count=count, mode=mode)
                found = [_row(name, mode, prompt, sample, score) for prompt, sample, score in drawn]
                summary.update(summarise(name, mode, found))
                rows += found
        return Evaluation(stamp=actor.stamp, summary=summary, rows=rows)

    def result(self, record: Record) -> Evaluation:
        assert isinstance(record, Evaluation)
        return record

    def _passes(self) -> list[tuple[str, SamplingParams, int]]:
        greedy = SamplingParams(
            temperature=0.0, max_new_tokens=self.sampled.max_new_tokens, stop_strings=self.sampled.stop_strings
        )
        return [("greedy", greedy, 1), ("sampled", self.sampled, self.samples_per_prompt)]

    def _draw(
        self, prompts: Prompts, params: SamplingParams, *, at: State, count: int, mode: str
    ) -> list[tuple[Any, Sample, Score]]:
        owners = [(prompt, index) for prompt in prompts.rows for index in range(count)]
        requests = [
            SampleRequest(
                key=f"{prompt.id}#{index}",
                prompt_tokens=prompt.token_ids,
                seed=derive_seed(self.seed, "eval", mode, prompt.id, index),
            )
            for prompt, index in owners
        ]
        done = {sample.key: sample for sample in self.generator.generate(requests, params, at=at)}
        samples = [done[request.key] for request in requests]
        asked = [
            ScoreRequest.about(prompt, sample.text, "terminated" if sample.terminated else "truncated")
            for (prompt, _), sample in zip(owners, samples, strict=True)
        ]
        scores = score_all(self.scorer, asked, self.between)
        return [(prompt, sample, score) for (prompt, _), sample, score in zip(owners, samples, scores, strict=True)]


def _row(name: str, mode: str, prompt: Any, sample: Sample, score: Score) -> dict[str, Any]:
    return {
        "set": name,
        "mode": mode,
        "prompt_id": prompt.id,
        "sample": int(sample.key.rsplit("#", 1)[1]),
        "prompt": prompt.text,
        "response": sample.text,
        "answer": prompt.answer,
        "score": score.value,
        "outcome": score.outcome,
        "extras": dict(score.extras),
        "response_tokens": len(sample.tokens),
        "terminated": sample.terminated,
    }


def summarise(name: str, mode: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """pass@1 and its standard error (over prompts: samples of one prompt are not independent), and shares.

    A row without a score counts against nothing: it is left out of the mean and shows in `error_frac`.
    """
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            by_prompt.setdefault(row["prompt_id"], []).append(row["score"])
    means = [sum(scores) / len(scores) for scores in by_prompt.values()]
    figures = {
        "error_frac": sum(row["score"] is None for row in rows) / len(rows),
        "truncated_frac": sum(not row["terminated"] for row in rows) / len(rows),
        "response_tokens_mean": sum(row["response_tokens"] for row in rows) / len(rows),
    }
    if means:
        mean = sum(means) / len(means)
        figures["pass_at_1"] = mean
        variance = sum((value - mean) ** 2 for value in means) / max(len(means) - 1, 1)
        figures["pass_at_1_stderr"] = math.sqrt(variance / len(means))
    passed = "greedy_" if mode == "greedy" else ""
    return {metrics.named(f"eval/{name}", passed + figure): value for figure, value in figures.items()}
