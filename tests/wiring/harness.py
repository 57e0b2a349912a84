"""A harness around the wired stages: fake engines with weights other than the initial ones, responses with holes,
samples without a score. A test passes a recipe, plays one step, and compares it with the textbook implementation."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fakes.bigram import END, VOCABULARY, BigramTrainer, initial_table
from fakes.components import BigramGenerator, FakeStream
from fakes.job import MEMORY, BuiltStages, Witness, open_run
from ppoctl.core.batch.grid import pack
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import (
    Advantages,
    Carry,
    Correction,
    GreedyRewards,
    GreedyRollouts,
    Logprobs,
    Rewards,
    Rollouts,
    Selection,
    State,
    Update,
    Values,
)
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.batch.selection import take
from ppoctl.core.ports import Actor, SampleRequest, SamplingParams
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import RunContext
from ppoctl.run.wire.components import Components
from tolerance import STEP
from wiring import textbook

STEP_NUMBER = 2
"""The step that the harness plays: not the first, so that an error in counting steps shows."""
UPDATES = {"actor": 2, "critic": 7}
"""Optimizer steps before that step; two are within the actor's warm-up."""
CARRIED_COEF = 0.35
"""KL coefficient carried over from the previous step."""
CARRY = Carry(
    CARRIED_COEF,
    reward_count=4.0,
    reward_mean=0.3,
    reward_m2=1.9,
    reward_reference_mean=0.2,
    reward_reference_std=0.7,
)
"""Carry of the previous step."""
LOST = {3: Score(None, "error", "no number"), 6: Score(None, "timeout", "10 s")}
"""Samples that the scorer fails on, by position."""

BASE: dict[str, Any] = {
    "name": "bench",
    "seed": 5,
    "steps": 4,
    "model": {"path": "bigram", "dtype": "float32"},
    "data": {"train": {"format": "gsm8k", "path": "none"}, "eval": {"held": {"format": "gsm8k", "path": "none"}}},
    "rollout": {
        "prompts_per_step": 6,
        "samples_per_prompt": 2,
        "max_prompt_tokens": 4,
        "max_new_tokens": 6,
        "temperature": 1.25,
        "top_p": 1.0,
        "top_k": None,
        "min_p": 0.0,
        "stop_strings": ["7 3"],
    },
    "reward": {
        "kind": "exact_match",
        "scale": {"from": [-0.3, 0.8], "to": [-1.0, 2.0]},
        "clip": None,
        "moments": {"kind": "none"},
        "unfinished_factor": 1.0,
        "overlong": None,
        "length_penalty": None,
        "max_error_frac": 0.3,
    },
    "ppo": {
        "epochs": 2,
        "critic_epochs": 3,
        "minibatch_seqs": 6,
        "critic_only_steps": 1,
        "advantages": {
            "kind": "gae",
            "gamma": 0.9,
            "gae_lambda": 0.7,
            "gae_lambda_value": None,
            "length_adaptive_alpha": None,
            "whiten": False,
        },
        "truncated": "terminal",
        "kl": {
            "place": "reward",
            "estimator": "k3",
            "input_clamp": None,
            "output_clamp": None,
            "coef": 0.15,
            "adaptive": None,
        },
        "policy_loss": {
            "kind": "clip",
            "clip_low": 0.12,
            "clip_high": 0.15,
            "dual_clip": 1.25,
            "entropy_coef": 0.02,
            "aggregation": "token_mean",
            "positive_nll_coef": 0.0,
        },
        "old_logprobs": "trainer",
        "value_loss": {"clip": 0.25, "scale": 0.7},
        "rollout_correction": {"kind": "tis", "min_ratio": 0.0, "max_ratio": 1.2, "normalize": False},
        "rollout_rejection": {"kind": "none"},
        "max_sequence_gap": None,
    },
    "actor": {
        "optimizer": {
            "lr": 0.4,
            "weight_decay": 0.05,
            "beta1": 0.8,
            "beta2": 0.9,
            "eps": 1e-3,
            "grad_clip": 0.05,
            "lr_schedule": "linear",
            "lr_warmup_updates": 3,
            "lr_decay_updates": 9,
            "lr_min_frac": 0.1,
        }
    },
    "critic": {
        "optimizer": {
            "lr": 0.2,
            "weight_decay": 0.03,
            "beta1": 0.7,
            "beta2": 0.85,
            "eps": 2e-3,
            "grad_clip": 0.06,
            "lr_schedule": "cosine",
            "lr_warmup_updates": 8,
            "lr_decay_updates": 11,
            "lr_min_frac": 0.2,
        }
    },
    "eval": {"every_steps": 1, "samples_per_prompt": 3, "temperature": 0.6, "max_new_tokens": 4},
    "tracking": {"kind": "none"},
}


def with_key(key: str, value: Any) -> dict[str, Any]:
    """Return the recipe of the harness with one key changed."""
    return with_keys({key: value})


def with_keys(changes: Mapping[str, Any]) -> dict[str, Any]:
    tables = deepcopy(BASE)
    for key, value in changes.items():
        *path, last = key.split(".")
        table = tables
        for name in path:
            table = table[name]
        table[last] = value
    return tables


class MovedTrainer(BigramTrainer):
    """A trainer that does not start at the reference: each logit of the actor is nudged differently, and the critic
    or the value head is not 0."""

    def start(self) -> None:
        super().start()
        self.table = moved_table(self.role)
        if self.value_head:
            self.table = torch.cat([self.table, moved_table("critic")[:, None]], dim=1)


def moved_table(role: str) -> Tensor:
    count = VOCABULARY if role == "critic" else VOCABULARY**2
    nudge = torch.sin(1.7 * torch.arange(count, dtype=torch.float32)) * (0.6 if role == "critic" else 0.8)
    table = initial_table(role) + nudge.view(initial_table(role).shape)
    if role == "actor":
        table[:, END] += 1.2  # so that responses differ in length
    return table


class LoggedGenerator(BigramGenerator):
    """A generator that records its requests."""

    def __init__(self, actor_at: Callable[[State], Actor]) -> None:
        super().__init__(actor_at)
        self.requests: list[tuple[SampleRequest, SamplingParams, State]] = []

    def open(self, params: SamplingParams) -> FakeStream:
        stream = super().open(params)
        submit = stream.submit

        def logged(requests: Sequence[SampleRequest]) -> None:
            self.requests += [(request, params, self.state) for request in requests]
            submit(requests)

        stream.submit = logged  # type: ignore[method-assign]
        return stream


class RiddleScorer:
    """Scores depend on all tokens of the response and on the ground truth; samples at the positions `lost` have no
    score. Positions are counted from 0 again after all scores have been taken. The components of a sum are extras,
    given with their weights."""

    def __init__(self, lost: Mapping[int, Score], weights: Mapping[str, float]) -> None:
        self.lost = lost
        self.weights = weights
        self.requests: list[ScoreRequest] = []
        self.handed: list[HandedScore] = []
        self.taken = 0

    def submit(self, request: ScoreRequest) -> "HandedScore":
        self.requests.append(request)
        words = len(request.response.split())
        parts = components(self.weights, request.response, request.required_truth())
        total = summed(self.weights, parts, request.response, request.required_truth())
        score = Score(total, "ok", extras={"words": words, **parts})
        self.handed.append(HandedScore(score, self.take))
        return self.handed[-1]

    def take(self, score: Score) -> Score:
        """Return the score for the next position: responses are submitted in the order in which they finish, but
        their scores are taken in row order."""
        place, self.taken = self.taken, self.taken + 1
        if self.taken == len(self.handed):
            self.handed, self.taken = [], 0
        return self.lost.get(place, score)

    def close(self) -> None:
        pass


class HandedScore(Future[Score]):
    """A finished score that reports when it is taken."""

    def __init__(self, score: Score, take: Callable[[Score], Score]) -> None:
        super().__init__()
        self.take = take
        self.set_result(score)

    def result(self, timeout: float | None = None) -> Score:
        return self.take(super().result(timeout))


def riddle(response: str, truth: str) -> float:
    """Return a score between -0.5 and 1.1."""
    numbers = [int(word) for word in response.split()]
    return (7 * sum(numbers) + 3 * len(numbers) + 5 * int(truth)) % 17 / 10 - 0.5


def weights_of(tables: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights of the components of a sum; empty: the reward is not a sum."""
    return {name: part["weight"] for name, part in tables["reward"].get("parts", {}).items()}


def components(names: Iterable[str], response: str, truth: str) -> dict[str, float]:
    """Return a score of each component; each component reads another ground truth."""
    return {name: riddle(response, str(int(truth) + 5 * place)) for place, name in enumerate(names)}


def summed(weights: Mapping[str, float], parts: Mapping[str, float], response: str, truth: str) -> float:
    """Return the score of a response, which is a weighted sum if there are components."""
    return sum(weights[name] * part for name, part in parts.items()) if parts else riddle(response, truth)


class Riddles:
    """Prompts of one to three tokens; within a step all ground truths differ."""

    def __init__(self, prompts_per_step: int) -> None:
        self.prompts_per_step = prompts_per_step
        self.first_held = 100

    def prompts_for(self, step: int, batch: int | None = None) -> Prompts:
        first = (step if batch is None else batch + 1) * self.prompts_per_step
        return prompts(step, range(first, first + self.prompts_per_step))

    def evaluation_sets(self) -> dict[str, Prompts]:
        return {"held": prompts(0, range(self.first_held, self.first_held + 3)), "far": prompts(0, range(200, 205))}


def prompts(step: int, numbers: range) -> Prompts:
    rows = tuple(
        Prompt(f"riddle {n}", tuple(2 + (3 * n + k) % (VOCABULARY - 2) for k in range(1 + n % 3)), f"{n}?", str(n))
        for n in numbers
    )
    return Prompts(step, rows)


@dataclass(frozen=True)
class Harness:
    """The run context of a run on fakes, with components that record their requests."""

    job: RunContext
    scorer: RiddleScorer
    generator: LoggedGenerator
    actor: MovedTrainer
    critic: MovedTrainer
    prompt_source: Riddles

    def state(self, role: str) -> State:
        """Return the state of the initial weights, counted as if the role had been updated before."""
        return replace(self.job.states.initial[role], step=STEP_NUMBER - 1, updates=UPDATES[role])


def open_harness(
    folder: Path, tables: Mapping[str, Any], *, lost: Mapping[int, Score] = LOST, witness: Witness | None = None
) -> Harness:
    recipe = Recipe.model_validate(tables)
    actor, critic = MovedTrainer("actor", value_head=recipe.value_head is not None), MovedTrainer("critic")
    made: list[LoggedGenerator] = []
    scorer = RiddleScorer(lost, weights_of(tables))
    prompt_source = Riddles(recipe.rollout.prompts_per_round)

    def generator(actor_at: Callable[[State], Actor], notify: Any, logs: Any) -> LoggedGenerator:
        made.append(LoggedGenerator(actor_at))
        return made[0]

    components = Components(
        {"actor": actor, "critic": critic}, generator, scorer, prompt_source, dict.fromkeys(recipe.trained, "bench")
    )
    job = open_run(folder / "run", recipe, witness or Witness(), components=components).job
    return Harness(job, scorer, made[0], actor, critic, prompt_source)


@dataclass(frozen=True)
class Played:
    """Records of one step."""

    rollouts: Rollouts
    rewards: Rewards
    values: Values | None
    """None: the estimator trains no critic."""
    logprobs: Logprobs
    correction: Correction | None
    greedy: tuple[GreedyRollouts, GreedyRewards] | None
    """Greedy responses, for an estimator that reads baselines."""
    advantages: Advantages
    critic_update: Update | None
    actor_update: Update
    tables: Mapping[str, Tensor]
    """Table of each role after its update."""
    selection: Selection | None = None
    """Rows that are sampled again; None: the updates train on all rows."""
    taken_advantages: Advantages | None = None
    """Advantages of these rows, as the updates receive them."""


def with_holes(rollouts: Rollouts) -> Rollouts:
    """Mask out tokens in the middle of responses, and one last token; shift the sampler's log-probs away from the
    trainer's."""
    mask = rollouts.mask.clone()
    mask[::3, 1] = False
    longest = int(rollouts.lengths.argmax())
    mask[longest, int(rollouts.lengths[longest]) - 1] = False
    gap = 0.4 * torch.sin(0.9 * torch.arange(mask.numel(), dtype=torch.float32)).view(mask.shape)
    return replace(rollouts, mask=mask, sampler_logprobs=(rollouts.sampler_logprobs + gap) * mask)


def play_step(harness: Harness) -> Played:
    """Run the stages of the harness's step in the order of the step function, on responses with holes."""
    stages: Any = BuiltStages(harness.job, STEP_NUMBER)
    actor = harness.state("actor")
    prompts: Any = harness.prompt_source.prompts_for(STEP_NUMBER)
    rollouts: Any = with_holes(stages.rollout.run(actor, prompts))
    rewards: Any = stages.reward.run(prompts, rollouts)
    recipe = harness.job.recipe
    has_critic = recipe.ppo.advantages.trains_critic and recipe.value_head is None
    critic: Any = harness.state("critic") if has_critic else None
    values: Any = stages.values.run(critic, rollouts) if has_critic else None
    logprobs: Any = stages.logprobs.run(actor, rollouts)
    correction = None if stages.correction is None else stages.correction.run(rollouts, logprobs)
    greedy: Any = None
    if harness.job.recipe.ppo.advantages.reads_baselines:
        responses = stages.greedy_rollout.run(actor, prompts)
        greedy = responses, stages.greedy_reward.run(prompts, responses)
        advantages: Any = stages.advantages.run(rollouts, rewards, logprobs, CARRY, *greedy)
    else:
        has_waited = harness.job.recipe.ppo.critic_only_until is not None
        carry = replace(CARRY, waited_steps=float(has_waited))  # in step 1
        advantages = stages.advantages.run(rollouts, rewards, values, logprobs, carry)
    rows = None if stages.resample is None else stages.resample.run(rollouts, advantages)
    taken = replace_by_rows(rows, rollouts, values, logprobs, correction, advantages)
    if stages.whitening is not None:
        taken[-1] = stages.whitening.run(taken[-1])
    critic_update: Any = stages.critic_update.run(critic, taken[0], taken[1], taken[-1]) if has_critic else None
    actor_update: Any = stages.actor_update.run(actor, taken[0], taken[2], taken[-1], taken[3])
    tables = {"actor": harness.actor.table, "critic": harness.critic.table}
    updates = (critic_update, actor_update, tables)
    of_rows = (rows, None if rows is None else taken[-1])
    return Played(rollouts, rewards, values, logprobs, correction, greedy, advantages, *updates, *of_rows)


def replace_by_rows(rows: Selection | None, *records: Any) -> list[Any]:
    """Return the selected rows of each record; None: the records themselves."""
    return [record if rows is None or record is None else take(rows, [record]) for record in records]


TOKEN_FIELDS = {"logprobs": "actor", "entropy": "entropy", "reference": "reference"}
"""Name in the textbook -> field of the log-probs, which is None if no later stage reads it."""


def numbers_of(played: Played) -> dict[str, np.ndarray]:
    """Return the numbers of a step under their names in the textbook."""
    advantages, metrics = played.advantages, {}
    for record in (played.rollouts, played.rewards, *(played.greedy or ()), played.logprobs, advantages):
        metrics |= record.metrics()
    if played.correction is not None:
        metrics |= {"weights": played.correction.weights, "kept": played.correction.mask}
        metrics |= played.correction.metrics()
    found: dict[str, Any] = {
        "scores": played.rewards.scores,
        "shaped": advantages.shaped,
        "token_rewards": advantages.token_rewards,
        "advantages": advantages.advantages,
        "mask": advantages.mask,
        "next kl/coef": advantages.carry.kl_coef,
        **metrics,
    }
    if played.selection is not None and played.taken_advantages is not None:
        found |= {"resampled": played.selection.rows, "taken advantages": played.taken_advantages.advantages}
        found |= played.selection.metrics()
    if played.values is not None:
        found |= {"values": played.values.values * played.rollouts.mask, "returns": advantages.returns}
        found |= {} if played.values.behind is None else {"behind": played.values.behind}
    if played.logprobs.values is not None:
        found |= {"values": played.logprobs.values * played.rollouts.mask, "returns": advantages.returns}
        found |= {} if played.logprobs.behind is None else {"behind": played.logprobs.behind}
    token_fields = {name: getattr(played.logprobs, field) for name, field in TOKEN_FIELDS.items()}
    found |= {name: grid * played.rollouts.mask for name, grid in token_fields.items() if grid is not None}
    for role, prefix, update in (("critic", "value", played.critic_update), ("actor", "policy", played.actor_update)):
        if update is None:
            continue
        found[f"{role} table"] = played.tables[role]
        found[f"{role} updates"] = update.updates
        found |= {
            f"{prefix} minibatches {name}": [value for value in column if value is not None]
            for name, column in update.per_minibatch.items()
        }
        found |= update.metrics()
    return {name: np.asarray(value, dtype=float) for name, value in found.items()}


def textbook_numbers(tables: Mapping[str, Any], played: Played) -> dict[str, np.ndarray]:
    """Return the numbers that the textbook computes from the same responses."""
    rollouts = played.rollouts
    packed = pack(rollouts.sequences, torch.arange(rollouts.num_seqs))
    before = np.zeros(rollouts.tokens.shape, dtype=int)
    before[packed.row.numpy(), packed.column.numpy()] = packed.tokens[packed.read_at].numpy()
    prompts_by_id = {
        row.id: row for row in Riddles(tables["rollout"]["prompts_per_step"]).prompts_for(STEP_NUMBER).rows
    }
    weights, truths = weights_of(tables), [prompts_by_id[name].answer or "" for name in rollouts.prompt_ids]
    parts = [components(weights, text, truth) for text, truth in zip(rollouts.texts, truths, strict=True)]
    scores = [
        None if place in LOST else summed(weights, parts[place], text, truth)
        for place, (text, truth) in enumerate(zip(rollouts.texts, truths, strict=True))
    ]
    lengths = rollouts.lengths.numpy()
    rollout = textbook.TextbookRollout(
        actor=moved_table("actor").double().numpy(),
        critic=moved_table("critic").double().numpy(),
        reference=initial_table("actor").double().numpy(),
        before=before,
        tokens=rollouts.tokens.numpy(),
        present=np.arange(rollouts.tokens.shape[1])[None, :] < lengths[:, None],
        mask=rollouts.mask.numpy(),
        sampler=rollouts.sampler_logprobs.double().numpy(),
        scores=scores,
        truncated=rollouts.finish.numpy() == 1,
        carry={
            name: getattr(CARRY, f"reward_{name}")
            for name in ("count", "mean", "m2", "reference_mean", "reference_std")
        },
        step=STEP_NUMBER,
        updates=UPDATES,
        carried_coef=CARRIED_COEF,
        components={name: np.array([of_row[name] for of_row in parts]) for name in weights},
        greedy=greedy_responses(tables),
    )
    return textbook.step(tables, rollout)


def greedy_responses(tables: Mapping[str, Any]) -> textbook.TextbookGreedy:
    """Return the greedy responses to the prompts of the step, with their scores."""
    rows = Riddles(tables["rollout"]["prompts_per_step"]).prompts_for(STEP_NUMBER).rows
    table = moved_table("actor").double().numpy()
    found = [textbook.greedy_response(table, row.token_ids[-1], END, tables["rollout"]) for row in rows]
    lengths = np.array([len(tokens) for tokens, _, _ in found])
    samples = tables["rollout"]["samples_per_prompt"]
    return textbook.TextbookGreedy(
        present=np.arange(lengths.max())[None, :] < lengths[:, None],
        scores=[
            None if place in LOST else riddle(text, row.answer)
            for place, ((_, text, _), row) in enumerate(zip(found, rows, strict=True))
        ],
        truncated=np.array([is_truncated for _, _, is_truncated in found]),
        of_row=np.arange(len(rows) * samples) // samples,
    )


@cache
def played(written: str) -> Played:
    """Return one step of the wired stages for a recipe in JSON."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        return play_step(open_harness(Path(folder), json.loads(written)))


@cache
def _with_textbook(written: str) -> tuple[Played, dict[str, np.ndarray]]:
    return played(written), textbook_numbers(json.loads(written), played(written))


def wired_and_textbook(tables: Mapping[str, Any]) -> tuple[Played, dict[str, np.ndarray]]:
    """Return one step of the wired stages and the textbook's numbers for it; each recipe is played once."""
    return _with_textbook(json.dumps(tables))


def require_equal(found: Mapping[str, np.ndarray], expected_numbers: Mapping[str, np.ndarray]) -> None:
    """Raise AssertionError unless every expected number is found."""
    for name, expected in expected_numbers.items():
        try:
            STEP.check(torch.from_numpy(np.asarray(found[name])), torch.from_numpy(np.asarray(expected)))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def differing(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> set[str]:
    """Return the names of numbers that differ between two recipes by much more than rounding."""
    different = set(one) ^ set(other)
    for name in set(one) & set(other):
        same_shape = one[name].shape == other[name].shape
        if not same_shape or np.abs(one[name] - other[name]).max(initial=0.0) > 100 * STEP.share:
            different.add(name)
    return different
