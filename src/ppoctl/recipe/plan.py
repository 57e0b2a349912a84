"""What a recipe will do, in numbers, before it does it. Reads a config.json and counts lines; writes nothing.

Bytes are estimates from the model's config.json and say so; everything else is exact arithmetic.
"""

from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from ppoctl.recipe.assets import model_config
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.rules import evaluates, longest_sequence
from ppoctl.recipe.schedule import learning_rate, planned_updates, updates_per_step
from ppoctl.recipe.schema import ByTokens, Recipe, Rows, TrainedTable


@dataclass(frozen=True)
class BatchPlan:
    """One PPO step."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    minibatch_seqs: int
    minibatches_per_epoch: int
    window_tokens: int
    """Longest prompt and longest response."""
    new_tokens_per_step_max: int
    tokens_per_step_max: int
    """Prompts and responses, all of full length."""


@dataclass(frozen=True)
class RolePlan:
    """What one role does."""

    processes: int
    layout: str
    """How the model is spread over them."""
    epochs: int
    updates_per_step: int
    updates_total: int
    warmup_updates: int
    warmup_steps: float
    lr_first: float
    lr_peak: float
    lr_last: float
    microbatches_per_minibatch_min: int
    microbatches_per_minibatch_max: int
    """Of each data rank, when all sequences are of full length."""
    replayed_updates_max: int
    """What a resume repeats at worst: the updates since the last saved state."""


@dataclass(frozen=True)
class DataPlan:
    """One dataset. Rows are None where counting them needs more than reading lines."""

    path: str
    rows: int | None
    prompts_total: int | None = None
    """Drawn in the whole run."""
    epochs: float | None = None
    """Passes over the dataset."""


@dataclass(frozen=True)
class EvalPlan:
    """Evaluations of the whole run."""

    at_steps: tuple[int, ...]
    responses_per_evaluation: int | None
    """Greedy and sampled, over all sets."""


@dataclass(frozen=True)
class StoragePlan:
    """States on disk. Bytes are estimates, None for a model that is not a local folder of a known kind."""

    saves: int
    keep_last: int
    parameters: int | None
    actor_state_bytes: int | None
    critic_state_bytes: int | None
    states_bytes: int | None
    """Kept pairs, one more while it is written, and the best actor's weights."""


@dataclass(frozen=True)
class Plan:
    """The whole run."""

    name: str
    batch: BatchPlan
    actor: RolePlan
    critic: RolePlan
    train: DataPlan
    eval_sets: dict[str, DataPlan]
    evaluation: EvalPlan
    storage: StoragePlan

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def plan(recipe: Recipe) -> Plan:
    """The arithmetic of a recipe that keeps the rules."""
    train = _dataset(recipe.data.train)
    drawn = recipe.steps * recipe.rollout.prompts_per_step
    passes = drawn / train.rows if train.rows else None
    eval_sets = {name: _dataset(table) for name, table in recipe.data.eval.items()}
    return Plan(
        name=recipe.name,
        batch=_batch(recipe),
        actor=_role(recipe, "actor", recipe.actor),
        critic=_role(recipe, "critic", recipe.critic),
        train=DataPlan(train.path, train.rows, drawn, passes),
        eval_sets=eval_sets,
        evaluation=_evaluation(recipe, eval_sets),
        storage=_storage(recipe),
    )


def count_parameters(config: dict[str, Any]) -> int | None:
    """Parameters of a dense Llama- or Qwen-like decoder from its config.json; None when that is not what it says."""
    try:
        hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        inner, heads = config["intermediate_size"], config["num_attention_heads"]
    except KeyError:
        return None
    if any(key.startswith(("num_experts", "num_local_experts", "n_routed_experts")) for key in config):
        return None
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    attention = 2 * hidden * queries + 2 * hidden * keys
    if config.get("model_type") == "qwen2" or config.get("attention_bias"):
        attention += queries + 2 * keys
    if config.get("model_type") == "qwen3":
        attention += 2 * head
    per_layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(layers * per_layer + hidden + embeddings)


def count_rows(table: Rows) -> int | None:
    """Rows of a local JSONL file that are used, by counting lines that are not blank; None for anything else."""
    path = Path(table.path)
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open("rb") as file:
        rows = sum(1 for line in file if line.strip())
    return rows if table.max_rows is None else min(rows, table.max_rows)


def _dataset(table: Rows) -> DataPlan:
    return DataPlan(table.path, count_rows(table))


def _batch(recipe: Recipe) -> BatchPlan:
    rollout = recipe.rollout
    sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    window = rollout.max_prompt_tokens + rollout.max_new_tokens
    return BatchPlan(
        steps=recipe.steps,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        sequences_per_step=sequences,
        minibatch_seqs=recipe.ppo.minibatch_seqs,
        minibatches_per_epoch=sequences // recipe.ppo.minibatch_seqs,
        window_tokens=window,
        new_tokens_per_step_max=sequences * rollout.max_new_tokens,
        tokens_per_step_max=sequences * window,
    )


def _role(recipe: Recipe, role: str, table: TrainedTable) -> RolePlan:
    per_step, total = updates_per_step(recipe, role), planned_updates(recipe, role)
    epochs = recipe.ppo.epochs if role == "actor" else recipe.ppo.critic_epochs or recipe.ppo.epochs
    optimizer = table.optimizer
    layout = layouts(recipe)[role]
    fewest, most = _microbatches(recipe, table, layout.data)
    return RolePlan(
        processes=layout.world_size,
        layout=layout.describe(),
        epochs=epochs,
        updates_per_step=per_step,
        updates_total=total,
        warmup_updates=optimizer.lr_warmup_updates,
        warmup_steps=optimizer.lr_warmup_updates / per_step,
        lr_first=learning_rate(0, optimizer, planned=total),
        lr_peak=optimizer.lr,
        lr_last=learning_rate(total - 1, optimizer, planned=total),
        microbatches_per_minibatch_min=fewest,
        microbatches_per_minibatch_max=most,
        replayed_updates_max=per_step * min(recipe.checkpoint.every_steps, recipe.steps),
    )


def _microbatches(recipe: Recipe, table: TrainedTable, data_ranks: int) -> tuple[int, int]:
    """Of a data rank: fewest (responses of one token, prompts of one) and most (all of full length)."""
    minibatch = ceil(recipe.ppo.minibatch_seqs / data_ranks)
    if not isinstance(table.batching, ByTokens):
        number = ceil(minibatch / table.batching.microbatch_seqs)
        return number, number
    cap = table.batching.max_tokens_per_microbatch
    return ceil(minibatch / cap), ceil(minibatch / (cap // longest_sequence(recipe)))


def _evaluation(recipe: Recipe, sets: dict[str, DataPlan]) -> EvalPlan:
    rows = [table.rows for table in sets.values()]
    known = [number for number in rows if number is not None]
    responses = sum(known) * (1 + recipe.eval.samples_per_prompt) if len(known) == len(rows) else None
    return EvalPlan(tuple(step for step in range(recipe.steps + 1) if evaluates(recipe, step)), responses)


def _storage(recipe: Recipe) -> StoragePlan:
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saves = ceil(recipe.steps / every)
    parameters = count_parameters(model_config(recipe))
    if parameters is None:
        return StoragePlan(saves, keep, None, None, None, None)
    weight = 4 if recipe.model.dtype == "float32" else 2
    # Main weights and two moments in float32; the critic has a head of one column in place of the vocabulary.
    actor = critic = parameters * (weight + 12)
    kept = min(saves, keep) + 1
    best = parameters * weight if recipe.checkpoint.best else 0
    return StoragePlan(saves, keep, parameters, actor, critic, kept * (actor + critic) + best)
