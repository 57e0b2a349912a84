"""80-eval: how good the actor is on held-out prompts. The one evaluation path, of `train` and `ppoctl eval` alike.

Finished samples survive a crash as those of a rollout do; scores are taken again.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppoctl import metrics
from ppoctl.batch.prompts import Prompt, Prompts
from ppoctl.batch.records import Evaluation, State
from ppoctl.batch.scores import Score, ScoreRequest
from ppoctl.ports import DrawnFor, Sample, SampleRequest, SamplingParams, Scorer
from ppoctl.stages.drawing import Drawing
from ppoctl.stages.reward import score_all
from ppoctl.stages.rollout import requests_of


@dataclass(frozen=True)
class _Pass:
    """One evaluation set, drawn in one mode."""

    set: str
    mode: str
    params: SamplingParams
    prompts: Sequence[Prompt]
    """The prompt of each request."""
    requests: Sequence[SampleRequest]


@dataclass(frozen=True)
class EvaluateStage:
    """Greedy and sampled pass@1 with standard error on every evaluation set."""

    drawing: Drawing
    scorer: Scorer
    sets: Mapping[str, Prompts]
    sampled: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    name: str = "eval"

    def run(self, actor: State) -> Evaluation:
        passes = [
            self._pass(name, prompts, mode, params, count)
            for name, prompts in self.sets.items()
            for mode, params, count in self._modes()
        ]
        sets = (f"{name} {prompts.identity}" for name, prompts in self.sets.items())
        key = hashlib.sha256("\n".join((actor.identity, self.fingerprint, *sets)).encode()).hexdigest()
        drawn_for = DrawnFor(actor.step, self.name, key)
        turns = [(one.params, one.requests) for one in passes]
        summary: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        with self.drawing.drawn(turns, drawn_for, lambda: actor) as drawn:
            for one in passes:
                found = self._scored(one, [drawn.samples[request.key] for request in one.requests])
                summary.update(summarise(one.set, one.mode, found))
                rows += found
        return Evaluation(stamp=actor.stamp, summary=summary, rows=rows)

    def _modes(self) -> list[tuple[str, SamplingParams, int]]:
        greedy = SamplingParams(
            temperature=0.0, max_new_tokens=self.sampled.max_new_tokens, stop_strings=self.sampled.stop_strings
        )
        return [("greedy", greedy, 1), ("sampled", self.sampled, self.samples_per_prompt)]

    def _pass(self, name: str, prompts: Prompts, mode: str, params: SamplingParams, count: int) -> _Pass:
        requests = requests_of(prompts, count, (self.seed, "eval", mode), f"{name}/{mode}/")
        return _Pass(name, mode, params, [prompt for prompt in prompts.rows for _ in range(count)], requests)

    def _scored(self, drawn: _Pass, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        asked = [
            ScoreRequest.about(prompt, sample.text, "terminated" if sample.terminated else "truncated")
            for prompt, sample in zip(drawn.prompts, samples, strict=True)
        ]
        scores = score_all(self.scorer, asked, self.drawing.gate.between)
        return [_row(drawn.set, drawn.mode, *row) for row in zip(drawn.prompts, samples, scores, strict=True)]


def _row(name: str, mode: str, prompt: Prompt, sample: Sample, score: Score) -> dict[str, Any]:
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
