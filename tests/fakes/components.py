"""A generator, a scorer and a prompt source for the bigram model, and a recipe that uses them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import torch

from fakes.bigram import (
    END,
    VOCABULARY,
    BigramTrainer,
    RoleCallback,
    experts_in,
    filtered_logs,
    ignore_call,
    without_ends,
)
from fakes.conversations import NumberDialogue, SumEnvironments, ignore
from fakes.turns import TURNS
from ppoctl.algorithms.role_model import trainable_of
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import State
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import NonFiniteError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import Actor, OutputRequest, Sample, SampleRequest, SamplingParams
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.sum import SumReward
from ppoctl.run import session
from ppoctl.run.wire.components import Components, OtherProcesses
from ppoctl.store.parallel_run import THREAD


class FakeStream:
    """Generates one response per call of `finished`, the last request first."""

    def __init__(self, generate: Callable[[SampleRequest], Sample]) -> None:
        self.generate = generate
        self.open: list[SampleRequest] = []
        self.is_closed = False

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        assert not self.is_closed
        self.open += requests

    def finished(self) -> Sequence[Sample]:
        TURNS.wait()
        assert not self.is_closed
        return (self.generate(self.open.pop()),) if self.open else ()

    def poll(self) -> Sequence[Sample]:
        return self.finished()

    def close(self) -> None:
        MEASUREMENTS.add_aborted(len(self.open))  # one token of each request
        self.is_closed = True


class BigramGenerator:
    """Samples from the actor's table with one seed per request; finishes requests in reverse order."""

    special: int | None = None
    """Token that `special_tokens` drops."""
    known: dict[tuple[int, bool, OutputRequest], tuple[torch.Tensor, torch.Tensor]]
    """Log-probs and probabilities that the stream has computed."""

    def __init__(self, actor_at: Callable[[State], Actor]) -> None:
        self.actor_at = actor_at
        self.lineage = ""
        self.num_generated = 0
        self.syncs = 0
        self.stream: FakeStream | None = None

    def prepare(self, state: State) -> None:
        assert self.stream is None or self.stream.is_closed
        self.state = state
        if self.lineage != state.lineage:
            actor = self.actor_at(state)
            assert isinstance(actor, BigramTrainer)
            self.table = actor.table[:, :VOCABULARY].clone()
            self.lineage = state.lineage
            self.syncs += 1

    def open(self, params: SamplingParams) -> "FakeStream":
        assert self.stream is None or self.stream.is_closed
        self.stream, self.known = FakeStream(lambda request: self.generate(request, params)), {}
        return self.stream

    def close(self) -> None:
        pass

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        generator = torch.Generator().manual_seed(request.seed)
        tokens, logprobs, text, stopped = [request.prompt_tokens[-1]], [], "", False
        filters = (params.temperature, params.top_p, params.top_k, params.min_p)
        output_request = OutputRequest(*filters, params.min_new_tokens, params.stop_token_ids)
        ends = {END, *params.stop_token_ids}
        limit = request.max_new_tokens or params.new_tokens(len(request.prompt_tokens))
        minimum = 0 if request.is_continued else params.min_new_tokens
        for number in range(limit):
            logs, probs = self._after(tokens[-1], number < minimum, output_request)
            token = int(torch.multinomial(probs, 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(logs[token]))
            whole = (*request.earlier_tokens, *tokens[1:])
            shown = [token for token in whole if params.special_tokens == "keep" or token != self.special]
            text = " ".join(map(str, shown))
            found = [text.index(stop) for stop in params.stop_strings if stop in text]
            stopped = (bool(found) and number >= minimum) or token in ends
            if stopped:
                text = text[: min(found)] if found else text
                break
        self.num_generated += 1
        experts = b""
        if params.returns_experts:
            experts = bytes(map(self.expert_of, (*request.prompt_tokens, *tokens[1:-1])))
        return Sample(
            request.key, tuple(tokens[1:]), tuple(logprobs), stopped, text, self.state.stamp, experts=experts
        )

    def expert_of(self, token: int) -> int:
        """Return the expert that the generator chooses: for one token another than the trainer's router."""
        return (int(experts_in(self.table)[token]) + (token == OTHER_EXPERT)) % 4

    def _after(self, token: int, is_early: bool, request: OutputRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs and the probabilities of the next token; they are computed once for each stream."""
        key = (token, is_early, request)
        if key not in self.known:
            logits = without_ends(self.table[token][None], torch.tensor([is_early]), None, request)
            [logs] = filtered_logs(logits, None, request)
            self.known[key] = logs, logs.exp()
        return self.known[key]


class FailsBesideOthers(BigramGenerator):
    """Generator that fails in the thread beside the stages of step 2."""

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        if self.state.step == 1 and threading.current_thread().name == THREAD:
            raise NonFiniteError("a log-prob is not finite")
        return super().generate(request, params)


class EvenScorer:
    """The score is the fraction of even tokens. `outcomes` overrides the score of single prompts; `other_reading`
    names an extra metric: 1 if the first token is even, else 0."""

    def __init__(self, outcomes: Mapping[str, Score] | None = None, other_reading: str | None = None) -> None:
        self.outcomes = outcomes or {}
        self.other_reading = other_reading

    def submit(self, request: ScoreRequest) -> Future[Score]:
        future: Future[Score] = Future()
        future.set_result(self.outcomes.get(request.prompt_id) or self._score(request))
        return future

    def close(self) -> None:
        pass

    def _score(self, request: ScoreRequest) -> Score:
        tokens = [int(word) for word in request.response.split()] or [1]  # an episode may have no turn
        extras = {} if self.other_reading is None else {self.other_reading: float(tokens[0] % 2 == 0)}
        return Score(
            sum(token % 2 == 0 for token in tokens) / len(tokens), "ok", extras=extras, answer=str(tokens[0])
        )


class CountingPrompts:
    """Prompts that are a pure function of the step."""

    def __init__(self, prompts_per_round: int) -> None:
        self.prompts_per_round = prompts_per_round

    def prompts_for(self, step: int, batch: int | None = None) -> Prompts:
        first = (step - 1 if batch is None else batch) * self.prompts_per_round
        return _prompts(step, range(first, first + self.prompts_per_round))

    def evaluation_sets(self) -> dict[str, Prompts]:
        return {"held": _prompts(0, range(100, 104))}


def _prompts(step: int, numbers: range) -> Prompts:
    rows = tuple(
        Prompt(f"p{n}", tuple(2 + (n + k) % (VOCABULARY - 2) for k in range(1 + n % 3)), f"question {n}", "even")
        for n in numbers
    )
    return Prompts(step, rows)


def fake_components(
    recipe: Recipe,
    *,
    on_minibatch: RoleCallback = ignore_call,
    on_file: RoleCallback = ignore_call,
    looks: float | Mapping[str, float] = 1,
    on_environment: Callable[[str], None] = ignore,
) -> Components:
    def trainer(role: str) -> BigramTrainer:
        save_looks = looks[role] if isinstance(looks, Mapping) else looks
        has_head = role == "actor" and recipe.value_head is not None
        merges = role == "actor" and trainable_of(recipe, role).lora is not None
        return BigramTrainer(
            role,
            on_minibatch=on_minibatch,
            on_file=on_file,
            looks=save_looks,
            value_head=has_head,
            merge_error=0.125 if merges else None,
        )

    tables = (recipe.environment, recipe.eval_environment)
    environments = None if tables == (None, None) else SumEnvironments(on_call=on_environment)
    return Components(
        environments=environments,
        eval_environments=environments,
        dialogue=environments and NumberDialogue(),
        trainers={role: trainer(role) for role in recipe.trained},
        generator=lambda actor_at, notify, logs: BigramGenerator(actor_at),
        scorer=EvenScorer(other_reading=_other_reading(recipe)),
        prompts=CountingPrompts(recipe.rollout.prompts_per_round),
        source_digests=dict.fromkeys(recipe.trained, "bigram"),
    )


def _other_reading(recipe: Recipe) -> str | None:
    """Return the name of the extra metric that the recipe's reward reports, if any."""
    if isinstance(recipe.reward, SumReward):
        return next(iter(recipe.reward.parts))
    if not isinstance(recipe.reward, Gsm8kScorer):
        return None
    return "lenient" if recipe.reward.strict else "strict"


OTHER_EXPERT = 5
"""Token for which the generator's router chooses another expert than the trainer's."""
FEW_ROWS = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 4,
    "max_new_tokens": 3,
    "keep_finished_every_s": 1e-9,
}
"""Table `rollout` of a step with four short rows, each of which is kept as soon as it is finished."""


def fake_recipe(**changes: Any) -> Recipe:
    """Return a recipe of three steps of eight sequences, two epochs of two minibatches. `changes` replace whole
    tables."""
    tables: dict[str, Any] = {
        "name": "fake",
        "seed": 3,
        "steps": 3,
        "model": {"path": "bigram", "dtype": "float32"},
        "data": {"train": {"format": "gsm8k", "path": "none"}, "eval": {"held": {"format": "gsm8k", "path": "none"}}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6},
        "reward": {"kind": "exact_match"},
        "ppo": {"epochs": 2, "minibatch_seqs": 4, "kl": {"place": "reward", "coef": 0.05}},
        "actor": {"optimizer": {"lr": 0.05}},
        "critic": {"optimizer": {"lr": 0.1}},
        "eval": {"every_steps": 2},
        "tracking": {"kind": "none"},
    }
    return Recipe.model_validate({**tables, **changes})


def commands_on_fakes(patch: pytest.MonkeyPatch, processes: Mapping[str, OtherProcesses] | None = None) -> None:
    """Let commands of this process run on fake components, with these other processes."""

    def prepare(recipe: Recipe, _: datetime, *, is_profiled: bool = False) -> tuple[Components, dict[str, str]]:
        assert is_profiled == (processes is not None)
        components = replace(fake_components(recipe), processes=lambda: processes or {})
        return components, {"model": "a" * 64, "data": "b" * 64}

    patch.setattr(session, "prepare", prepare)
