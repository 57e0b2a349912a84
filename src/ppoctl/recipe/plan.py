"""What a recipe will do, in numbers, before it does it. Reads a config.json and counts lines; writes nothing.

Bytes are estimates from the model's config.json and say so; everything else is exact arithmetic.
"""

from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from ppoctl.model.cost import count_parameters
from ppoctl.model.reading import shape_if_here
from ppoctl.model.shape import ModelShape
from ppoctl.recipe.batching import limit, microbatches
from ppoctl.recipe.memory.driver import records_of
from ppoctl.recipe.memory.estimate import Memory, batch_of, estimate, with_totals
from ppoctl.recipe.metric_rules import evaluates
from ppoctl.recipe.parallel import devices, is_one_process, layouts, processes
from ppoctl.recipe.rules import longest_sequence
from ppoctl.recipe.schedule import learning_rate, planned_updates, updates_per_step
from ppoctl.recipe.schema import Recipe, Rows, TrainedTable


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
    data_ranks: int
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
    recompute: str
    forward_microbatch: str
    """What one of log-probs, reference or values holds, at most."""
    replayed_updates_max: int
    """What a resume repeats at worst: the updates since the last saved state."""


@dataclass(frozen=True)
class ProcessPlan:
    """Which processes there are."""

    engines: int
    """Of the generator; they share one queue."""
    generator: int
    """Processes of all engines."""
    is_one_process: bool
    """All roles live in the process of the command; otherwise in processes of Ray."""
    placement: str
    devices: int
    """GPUs, or places on CPUs."""
    ray_address: str | None


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
    """On disk. Bytes are estimates, None for a model that is not a local folder of a known family."""

    saves: int
    keep_last: int
    parameters: int | None
    actor_state_bytes: int | None
    critic_state_bytes: int | None
    states_bytes: int | None
    """Kept pairs, one more while it is written, and the best actor's weights."""
    records_bytes: int
    """What the stages of one step commit, all responses of full length."""
    records_kept_bytes: int
    """Of steps that a kept pair may go on from; rollouts kept to be read come on top."""
    gathered_bytes: dict[str, int] = field(default_factory=dict)
    """By role, what each of its ranks gathers from its data and context ranks at a save; not of roles that gather
    nothing."""


@dataclass(frozen=True)
class Plan:
    """The whole run."""

    name: str
    batch: BatchPlan
    actor: RolePlan
    critic: RolePlan
    processes: ProcessPlan
    train: DataPlan
    eval_sets: dict[str, DataPlan]
    evaluation: EvalPlan
    storage: StoragePlan
    memory: Memory | None
    """None for a model that is not a local folder of a known family."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, sums included."""
        return dict(with_totals(self))


def plan(recipe: Recipe, gpu_gib: float | None = None) -> Plan:
    """The arithmetic of a recipe that keeps the rules, for GPUs of so much memory or for this machine's CPU."""
    train = _dataset(recipe.data.train)
    drawn = recipe.steps * recipe.rollout.prompts_per_step
    passes = drawn / train.rows if train.rows else None
    eval_sets = {name: _dataset(table) for name, table in recipe.data.eval.items()}
    shape = shape_if_here(recipe.model.path)
    memory = None if shape is None else estimate(recipe, shape, gpu_gib)
    return Plan(
        name=recipe.name,
        batch=_batch(recipe),
        actor=_role(recipe, "actor", recipe.actor),
        critic=_role(recipe, "critic", recipe.critic),
        processes=_processes(recipe),
        train=DataPlan(train.path, train.rows, drawn, passes),
        eval_sets=eval_sets,
        evaluation=_evaluation(recipe, eval_sets),
        storage=_storage(recipe, shape, memory),
        memory=memory,
    )


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
    fewest, most = microbatches(recipe, role, longest_sequence(recipe))
    key, held = limit(table.batching, with_gradient=False)
    return RolePlan(
        processes=layout.world_size,
        layout=layout.describe(),
        data_ranks=layout.data,
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
        recompute=table.recompute,
        forward_microbatch=f"{held:,} {'tokens' if 'tokens' in key else 'sequences'}",
        replayed_updates_max=per_step * min(recipe.checkpoint.every_steps, recipe.steps),
    )


def _processes(recipe: Recipe) -> ProcessPlan:
    return ProcessPlan(
        engines=recipe.generator.engines,
        generator=processes(recipe)["generator"],
        is_one_process=is_one_process(recipe),
        placement=recipe.cluster.placement,
        devices=devices(recipe),
        ray_address=recipe.cluster.ray_address,
    )


def _evaluation(recipe: Recipe, sets: dict[str, DataPlan]) -> EvalPlan:
    rows = [table.rows for table in sets.values()]
    known = [number for number in rows if number is not None]
    responses = sum(known) * (1 + recipe.eval.samples_per_prompt) if len(known) == len(rows) else None
    return EvalPlan(tuple(step for step in range(recipe.steps + 1) if evaluates(recipe, step)), responses)


def storage_of(recipe: Recipe) -> StoragePlan:
    """What the run will have on disk."""
    shape = shape_if_here(recipe.model.path)
    return _storage(recipe, shape, None if shape is None else estimate(recipe, shape))


def _storage(recipe: Recipe, shape: ModelShape | None, memory: Memory | None) -> StoragePlan:
    every, keep = recipe.checkpoint.every_steps, recipe.checkpoint.keep_last
    saves, records = ceil(recipe.steps / every), records_of(batch_of(recipe)).total
    records_kept = records * min(recipe.steps, keep * every)
    if shape is None or memory is None:
        return StoragePlan(saves, keep, None, None, None, None, records, records_kept)
    weight = 4 if recipe.model.dtype == "float32" else 2
    actor, critic = (memory.roles[role].state for role in ("actor", "critic"))
    kept = min(saves, keep) + 1
    best = count_parameters(shape) * weight if recipe.checkpoint.best else 0
    total = kept * (actor + critic) + best
    gathered = {
        role: memory.roles[role].state // layout.model_ranks
        for role, layout in layouts(recipe).items()
        if layout.distributed_optimizer and layout.data * layout.context > 1
    }
    gathers = gathered if recipe.checkpoint.reshardable == "full" else {}
    return StoragePlan(saves, keep, count_parameters(shape), actor, critic, total, records, records_kept, gathers)
