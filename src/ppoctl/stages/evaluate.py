"""80-eval: how good the actor is on held-out prompts. The one evaluation path, of `train` and `ppoctl eval` alike.

Finished samples survive a crash as those of a rollout do; scores are taken again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ppoctl.batch.prompts import Prompt, Prompts
from ppoctl.batch.records import Evaluation, State
from ppoctl.batch.scores import Score
from ppoctl.ports import Sample, SampleRequest, SampleSetKey, SamplingParams, Scorer
from ppoctl.stages.eval_metrics import UNSCORED, Estimates, Mode, Rows, eval_metric_name, summarise
from ppoctl.stages.generation import RequestBatch, SampleGeneration
from ppoctl.stages.overlapped_scoring import request_about
from ppoctl.stages.reward import score_all
from ppoctl.stages.rollout import requests_of


@dataclass(frozen=True)
class _Pass:
    """One evaluation set, drawn in one mode."""

    set: str
    mode: Mode
    params: SamplingParams
    prompts: Sequence[Prompt]
    """The prompt of each request."""
    requests: Sequence[SampleRequest]


def nobody(_: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class EvaluateStage:
    """Scores of the actor on every evaluation set, greedy, sampled or both."""

    drawing: SampleGeneration
    scorer: Scorer
    sets: Mapping[str, Prompts]
    sampled: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    name: str = "eval"
    modes: tuple[Mode, ...] = ("greedy", "sampled")
    estimates: Estimates = field(default_factory=Estimates)
    needs_truth: Callable[[Prompt], bool] = lambda _: False
    """Whether a prompt's scorer compares with a ground truth; a row that has none is then not scored."""
    measured: Callable[[Rows], Mapping[str, float]] = lambda _: {}
    """Figures of one's own of the rows of a set and pass; these have the `fields` of the data besides."""
    printed: int = 0
    """Responses of each set and pass that are told to `say`."""
    notify: Callable[[str], None] = nobody

    def run(self, actor: State) -> Evaluation:
        passes = [
            self._pass(name, prompts, mode, params, count)
            for name, prompts in self.sets.items()
            for mode, params, count in self._modes()
        ]
        sets = (f"{name} {prompts.identity}" for name, prompts in self.sets.items())
        key = hashlib.sha256("\n".join((actor.identity, self.fingerprint, *sets)).encode()).hexdigest()
        drawn_for = SampleSetKey(actor.step, self.name, key)
        turns = [RequestBatch(one.params, one.requests, f"{one.set} {one.mode}") for one in passes]
        summary: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        with self.drawing.run(turns, drawn_for, lambda: actor) as drawn:
            for one in passes:
                found = self._scored(one, [drawn.samples[request.key] for request in one.requests])
                summary.update(summarise(one.set, one.mode, found, self.estimates))
                summary.update(self._measured(one, found))
                for row in islice(found, self.printed):
                    self.notify(_told(row))
                rows += found
        return Evaluation(stamp=actor.stamp, summary=summary, rows=rows)

    def _modes(self) -> list[tuple[Mode, SamplingParams, int]]:
        greedy = replace(self.sampled, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)
        of_modes = {"greedy": (greedy, 1), "sampled": (self.sampled, self.samples_per_prompt)}
        return [(mode, *of_modes[mode]) for mode in self.modes]

    def _pass(self, name: str, prompts: Prompts, mode: Mode, params: SamplingParams, count: int) -> _Pass:
        requests = requests_of(prompts, count, (self.seed, "eval", mode), f"{name}/{mode}/")
        return _Pass(name, mode, params, [prompt for prompt in prompts.rows for _ in range(count)], requests)

    def _scored(self, drawn: _Pass, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        both = list(zip(drawn.prompts, samples, strict=True))
        asked = {
            sample.key: request_about(prompt, sample)
            for prompt, sample in both
            if prompt.answer is not None or not self.needs_truth(prompt)
        }
        scores = score_all(self.scorer, list(asked.values()), self.drawing.gate.between)
        found = dict(zip(asked, scores, strict=True))
        return [_row(drawn.set, drawn.mode, prompt, sample, found.get(sample.key)) for prompt, sample in both]

    def _measured(self, drawn: _Pass, rows: Rows) -> dict[str, float]:
        given = [{**row, "fields": dict(prompt.fields)} for prompt, row in zip(drawn.prompts, rows, strict=True)]
        found = self.measured(given)
        return {eval_metric_name(drawn.set, drawn.mode, f"custom_{name}"): value for name, value in found.items()}


def _row(name: str, mode: str, prompt: Prompt, sample: Sample, score: Score | None) -> dict[str, Any]:
    row = {
        "set": name,
        "mode": mode,
        "prompt_id": prompt.id,
        "sample": int(sample.key.rsplit("#", 1)[1]),
        "prompt": prompt.text,
        "response": sample.text,
        "answer": prompt.answer,
        "score": score.value if score else None,
        "outcome": score.outcome if score else UNSCORED,
        "extras": dict(score.extras) if score else {},
        "response_tokens": len(sample.tokens),
        "terminated": sample.terminated,
    }
    # Scorers that read no answer leave rows as they were before there was such a field.
    return row if score is None or score.answer is None else {**row, "given": score.answer}


_TOLD_CHARS = 4000


def _told(row: Mapping[str, Any]) -> str:
    """A sample for the log: what it was asked and what became of it, then its response."""
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    ended = "terminated" if row["terminated"] else "truncated"
    head = f"eval {row['set']} {row['mode']} {row['prompt_id']}: {score}, {row['response_tokens']} tokens, {ended}"
    texts = ((name, row[name] or "") for name in ("prompt", "response"))
    return "\n".join([head, *(f"{name}:\n{_cut(text)}" for name, text in texts)])


def _cut(text: str) -> str:
    more = len(text) - _TOLD_CHARS
    return text if more <= 0 else f"{text[:_TOLD_CHARS]}\n... and {more} characters more"
