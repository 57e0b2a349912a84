"""80-eval: evaluate the actor on held-out prompts. `train` and `ppoctl eval` share this stage.

Finished samples survive a crash, as in a rollout; scores are computed again.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ppoctl.algorithms.stages.eval_metrics import UNSCORED, Estimates, Mode, Rows, eval_metric_name, summarise
from ppoctl.algorithms.stages.generation import RequestBatch, SampleGeneration
from ppoctl.algorithms.stages.overlapped_scoring import request_about
from ppoctl.algorithms.stages.reward import failure_of, score_all
from ppoctl.algorithms.stages.rollout import requests_of
from ppoctl.core.batch.episodes import EpisodeSettings
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import Evaluation, State
from ppoctl.core.batch.scores import Score
from ppoctl.core.ports import Sample, SampleRequest, SampleSetKey, SamplingParams, Scorer


@dataclass(frozen=True)
class _Pass:
    """One pass over an evaluation set in one mode."""

    set: str
    mode: Mode
    params: SamplingParams
    prompts: Sequence[Prompt]
    """The prompt of each request."""
    requests: Sequence[SampleRequest]


def ignore_message(_: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class EvaluateStage:
    """Stage that scores the actor on every evaluation set, with greedy decoding, sampling, or both."""

    generation: SampleGeneration
    scorer: Scorer
    sets: Mapping[str, Prompts]
    sampled: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    name: str = "eval"
    episodes: EpisodeSettings | None = None
    """Environment and limits of the responses; None: a response has one turn."""
    failed_score: float | None = None
    """Score of an episode whose environment failed; None: it has no score."""
    modes: tuple[Mode, ...] = ("greedy", "sampled")
    estimates: Estimates = field(default_factory=Estimates)
    needs_truth: Callable[[Prompt], bool] = lambda _: False
    """Whether the scorer of a prompt compares with a ground truth. A row without a ground truth is then not
    scored."""
    measured: Callable[[Rows], Mapping[str, float]] = lambda _: {}
    """Function for user-defined metrics of the rows of one set and pass. Each row also contains the `fields` of its
    dataset row."""
    printed: int = 0
    """Number of responses of each set and pass that are sent to `notify`."""
    notify: Callable[[str], None] = ignore_message

    def run(self, actor: State) -> Evaluation:
        passes = [
            self._pass(name, prompts, mode, params, count)
            for name, prompts in self.sets.items()
            for mode, params, count in self._modes()
        ]
        sets = (f"{name} {prompts.identity}" for name, prompts in self.sets.items())
        key = hashlib.sha256("\n".join((actor.identity, self.fingerprint, *sets)).encode()).hexdigest()
        sample_set = SampleSetKey(actor.step, self.name, key)
        batches = [
            RequestBatch(eval_pass.params, eval_pass.requests, f"{eval_pass.set} {eval_pass.mode}", self.episodes)
            for eval_pass in passes
        ]
        summary: dict[str, float] = {}
        rows: list[dict[str, Any]] = []
        with self.generation.run(batches, sample_set, lambda: actor) as generated:
            for eval_pass in passes:
                scored = self._scored(eval_pass, [generated.samples[request.key] for request in eval_pass.requests])
                summary.update(summarise(eval_pass.set, eval_pass.mode, scored, self.estimates))
                summary.update(self._measured(eval_pass, scored))
                for row in islice(scored, self.printed):
                    self.notify(_sample_text(row))
                rows += scored
        return Evaluation(stamp=actor.stamp, summary=summary, rows=rows)

    def _modes(self) -> list[tuple[Mode, SamplingParams, int]]:
        greedy = replace(self.sampled, temperature=0.0, top_p=1.0, top_k=None, min_p=0.0)
        of_modes = {"greedy": (greedy, 1), "sampled": (self.sampled, self.samples_per_prompt)}
        return [(mode, *of_modes[mode]) for mode in self.modes]

    def _pass(self, name: str, prompts: Prompts, mode: Mode, params: SamplingParams, count: int) -> _Pass:
        requests = requests_of(prompts, count, (self.seed, "eval", mode), f"{name}/{mode}/")
        return _Pass(name, mode, params, [prompt for prompt in prompts.rows for _ in range(count)], requests)

    def _scored(self, eval_pass: _Pass, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        pairs = list(zip(eval_pass.prompts, samples, strict=True))
        scores_by_key = {
            sample.key: failure
            for sample in samples
            if (failure := failure_of(sample.episode, self.failed_score)) is not None
        }
        requests = {
            sample.key: request_about(prompt, sample)
            for prompt, sample in pairs
            if sample.key not in scores_by_key and (prompt.answer is not None or not self.needs_truth(prompt))
        }
        scores = score_all(self.scorer, list(requests.values()), self.generation.gate.between)
        scores_by_key |= dict(zip(requests, scores, strict=True))
        return [
            _row(eval_pass.set, eval_pass.mode, prompt, sample, scores_by_key.get(sample.key))
            for prompt, sample in pairs
        ]

    def _measured(self, eval_pass: _Pass, rows: Rows) -> dict[str, float]:
        with_fields = [
            {**row, "fields": dict(prompt.fields)} for prompt, row in zip(eval_pass.prompts, rows, strict=True)
        ]
        metrics = self.measured(with_fields)
        return {
            eval_metric_name(eval_pass.set, eval_pass.mode, f"custom_{name}"): value
            for name, value in metrics.items()
        }


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
    if sample.episode is not None:
        row |= sample.episode.columns
    # A scorer that returns no answer adds no field: such rows equal the rows that earlier versions wrote.
    return row if score is None or score.answer is None else {**row, "given": score.answer}


_PRINTED_CHARS = 4000


def _sample_text(row: Mapping[str, Any]) -> str:
    """Return a sample as text for the log: a line with prompt id and score, then the prompt and the response, or the
    messages of an episode."""
    score = "no score" if row["score"] is None else f"score {row['score']:g}"
    ended = "terminated" if row["terminated"] else "truncated"
    head = f"eval {row['set']} {row['mode']} {row['prompt_id']}: {score}, {row['response_tokens']} tokens, {ended}"
    texts = [("prompt", row["prompt"]), ("response", row["response"])]
    if "conversation" in row:
        head += f" after {row['turns']} turns ({row['end']})"
        texts[1:] = [(message["role"], message["content"]) for message in row["conversation"]]
    return "\n".join([head, *(f"{name}:\n{_shortened(text or '')}" for name, text in texts)])


def _shortened(text: str) -> str:
    num_cut = len(text) - _PRINTED_CHARS
    return text if num_cut <= 0 else f"{text[:_PRINTED_CHARS]}\n... and {num_cut} more characters"
