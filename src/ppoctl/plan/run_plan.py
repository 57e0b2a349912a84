"""The plan of a run in numbers, computed before the run starts.

The module reads config.json and counts the lines of data files. It writes nothing.

Bytes are estimates from the config.json of the model. All other numbers are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ppoctl.algorithms import sizes
from ppoctl.algorithms.choose import StepFunctionAt, step_function_at, trace_at, traces
from ppoctl.algorithms.ppo_table import algorithm_name
from ppoctl.algorithms.role_model import model_of, reward_model_of, reward_models
from ppoctl.algorithms.role_table import TrainedTable
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import learning_rate_of
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.data.row_files import rows_of
from ppoctl.models.cost import count_parameters
from ppoctl.models.folder import local_folder
from ppoctl.plan.algorithm import algorithm, reward_steps
from ppoctl.plan.disk_space import StoragePlan, storage_of
from ppoctl.plan.flops import WorkPlan, work_of
from ppoctl.plan.memory.estimate import Memory, estimate_here, misfit, with_totals
from ppoctl.plan.memory.generator_memory import advised_engines
from ppoctl.plan.shared_sizes import microbatches, stage_rows
from ppoctl.plan.trained_part import trained_part
from ppoctl.plan.transfer import TransferPlan, transfer_of
from ppoctl.recipe.cadence import evaluates
from ppoctl.recipe.parallel import devices, is_one_process, layouts, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.store.saved_by import SavedBy, saved_by


@dataclass(frozen=True)
class BatchPlan:
    """The batch of one PPO step."""

    steps: int
    prompts_per_step: int
    samples_per_prompt: int
    sequences_per_step: int
    window_tokens: int
    """Number of tokens of the longest prompt and the longest response together."""
    new_tokens_per_step_max: int
    """Number of tokens of all responses, in the maximum number of rounds, if all have full length."""
    new_tokens_per_step_min: int
    """Number of tokens of all responses, in the minimum number of rounds."""
    prompts_per_round: int
    rounds_min: int
    rounds_max: int
    """Rounds of generation; 1 without dynamic sampling."""
    tokens_per_step_max: int
    """Number of tokens of all prompts and responses of a step, if all have full length."""


@dataclass(frozen=True)
class RolePlan:
    """Work of one role in the whole run: updates, learning rates, microbatches."""

    layout: str
    """Description of the parallel layout."""
    data_ranks: int
    epochs: int
    minibatch_seqs: int
    minibatches_per_epoch: int
    updates_per_step: int
    updates_per_step_min: int
    updates_total: int
    updates_total_min: int
    """Updates differ from their minimum if the role trains on all responses of a varying number of rounds, or if
    `ppo.critic_only_until` lets only the critic train."""
    warmup_updates: int
    warmup_steps: float
    lr_first: float
    lr_peak: float
    lr_last: float
    microbatches_per_minibatch_min: int
    microbatches_per_minibatch_max: int
    """Microbatches of each data rank in a minibatch, if all sequences have full length."""
    recompute: str
    forward_microbatch: str
    """Limit, as text, for a microbatch of log-probs, reference log-probs or values."""
    parameters: int | None
    """Parameters of the model, with the padding of its vocabulary; None: the model is not on this machine."""
    trained_parameters: int | None
    trained_part: str
    """Description of the part that trains; empty: all of the model."""
    replayed_updates_max: int
    """Maximum number of updates that a resume replays: the updates since the last saved state."""


@dataclass(frozen=True)
class CriticStart:
    """The separate model that the critic starts from."""

    path: str
    dtype: str
    family: str | None
    """Family of the model; None: the model is not on this machine."""
    parameters: int | None
    saved_by: SavedBy | None
    """The run that saved the model as a state; None: the model is not a saved state."""


@dataclass(frozen=True)
class RewardModelPlan:
    """A reward model and its work in one step."""

    path: str
    dtype: str
    layout: str
    """Description of the parallel layout."""
    family: str | None
    """Family of the model; None: the model is not on this machine, and the following fields are unknown."""
    parameters: int | None
    max_tokens: int | None
    """Maximum number of tokens of one text, and of all texts of one pass."""
    passes_per_step_max: int | None
    """Number of passes of each data rank in a step whose texts have full length."""


@dataclass(frozen=True)
class DataPlan:
    """Size and use of one data set. `rows` is None if reading lines is not enough to count the rows."""

    path: str
    rows: int | None
    prompts_total: int | None = None
    """Number of prompts that the whole run takes from the data set, in the maximum number of rounds."""
    epochs: float | None = None
    """Number of passes over the data set in the whole run, in the maximum number of rounds."""
    prompts_total_min: int | None = None
    """Number of prompts that the whole run takes in the minimum number of rounds."""


@dataclass(frozen=True)
class EvalPlan:
    """Evaluations of the whole run."""

    at_steps: tuple[int, ...]
    responses_per_evaluation: int | None
    """Number of responses of one evaluation, greedy and sampled, over all sets. None: a set has an unknown size."""


@dataclass(frozen=True)
class Plan:
    """The plan of a whole run."""

    name: str
    called: str
    """Name of the algorithm, such as PPO or GRPO."""
    batch: BatchPlan
    roles: Mapping[str, RolePlan]
    """Trained role -> its work."""
    critic_start: CriticStart | None
    """The separate model of the critic. None: the recipe trains no critic, or the critic starts from the actor's
    weights with a head of zeros."""
    reward_models: Mapping[str, RewardModelPlan]
    """Key of the table -> reward model."""
    processes: Mapping[str, int]
    """Role -> number of processes. The generator has the processes of all its engines."""
    is_one_process: bool
    """Whether all roles run in the process of the command. Otherwise the roles run in Ray processes."""
    devices: int
    """Number of GPUs, or of slots on CPUs, that the processes use."""
    engines_per_gpu: int
    advised_engines_per_gpu: int
    """Number of engines on a GPU that probably decode fastest; without GPUs, the number of the recipe."""
    algorithm: Mapping[str, str]
    """Choice of the algorithm -> description of the choice."""
    rewards: Mapping[str, str]
    """Step of reward shaping -> description of the step, in the order of application."""
    train: DataPlan
    eval_sets: dict[str, DataPlan]
    evaluation: EvalPlan
    work: WorkPlan | None
    """FLOPs of one step, in the maximum number of rounds; None: a model is not on this machine."""
    work_min: WorkPlan | None
    """FLOPs of one step in the minimum number of rounds."""
    transfer: TransferPlan | None
    """Transfer of the policy's weights to the engines; None: a model is not on this machine."""
    storage: StoragePlan
    memory: Memory | None
    """Estimated bytes of the run; None: a model is not a local folder of a known family."""

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, including sums."""
        return dict(with_totals(self))


def plan(recipe: Recipe, gpu_gib: float | None = None, choose: StepFunctionAt = step_function_at) -> Plan:
    """Return the plan of a valid recipe, for GPUs of `gpu_gib` GiB or, if None, for the CPUs of this machine."""
    eval_sets = {name: DataPlan(table.named, rows_of(table)) for name, table in recipe.data.eval.items()}
    memory, table = estimate_here(recipe, gpu_gib, choose=choose), recipe.generator
    advised = table.engines_per_gpu
    if memory is not None and gpu_gib is not None:
        advised = _advised_engines(recipe, memory, gpu_gib, choose)
    return Plan(
        name=recipe.name,
        called=algorithm_name(recipe.ppo.model_dump()),
        batch=_batch(recipe, choose),
        roles={role: _role(recipe, role, table) for role, table in recipe.trained.items()},
        critic_start=_critic_start(recipe),
        reward_models={dotted(key): _reward_model(recipe, key, choose) for key in reward_models(recipe)},
        processes=processes(recipe),
        is_one_process=is_one_process(recipe),
        devices=devices(recipe),
        engines_per_gpu=table.engines_per_gpu,
        advised_engines_per_gpu=advised,
        algorithm=algorithm(recipe),
        rewards=reward_steps(recipe),
        train=_train(recipe, choose),
        eval_sets=eval_sets,
        evaluation=_evaluation(recipe, eval_sets),
        work=work_of(recipe, choose),
        work_min=work_of(recipe, choose, most=False),
        transfer=None if memory is None else transfer_of(recipe, memory),
        storage=storage_of(recipe, choose),
        memory=memory,
    )


def _advised_engines(recipe: Recipe, memory: Memory, gpu_gib: float, choose: StepFunctionAt) -> int:
    """Return the number of engines on a GPU that probably decode fastest, if that many fit."""
    table = recipe.generator
    most = advised_engines(memory.generator, table, sizes.sequences_per_round(recipe))
    # A broadcast allows one process per device.
    for number in range(most, table.engines_per_gpu, -1) if recipe.cluster.weights != "broadcast" else ():
        several = table.model_copy(update={"engines_per_gpu": number})
        found = estimate_here(recipe.model_copy(update={"generator": several}), gpu_gib, choose=choose)
        if found is not None and misfit(found) is None:
            return number
    return table.engines_per_gpu


def _critic_start(recipe: Recipe) -> CriticStart | None:
    models = [model_of(recipe, role) for role in recipe.trained]
    model = next((model for model in models if model.key != model_of(recipe, POLICY).key), None)
    if model is None:
        return None
    folder, shape = local_folder(model.path), model.shape
    source_run = None if folder is None else saved_by(folder)
    if shape is None:
        return CriticStart(model.path, model.dtype, None, None, source_run)
    # The critic is counted as a model with tied embeddings, which adds no output layer, and one row of value weights.
    parameters = count_parameters(replace(shape, tied_embeddings=True)) + shape.hidden_size
    return CriticStart(model.path, model.dtype, shape.family, parameters, source_run)


def _reward_model(recipe: Recipe, key: KeyPath, choose: StepFunctionAt) -> RewardModelPlan:
    table, model = reward_models(recipe)[key], reward_model_of(recipe, key)
    layout, shape = table.parallel or ParallelTable(), model.shape
    if shape is None:
        return RewardModelPlan(model.path, model.dtype, layout.describe(), None, None, table.max_tokens, None)
    # Assumed: texts of a step have about as many tokens as its sequences, though the tokenizer differs.
    most = sizes.reward_tokens(table, shape)
    texts_per_pass = max(most // min(sizes.longest_sequence(recipe) + 1, most), 1)
    traced = trace_at(recipe, recipe.steps, choose)
    rows = stage_rows(traced, recipe)
    passes = sum(
        rows[stage.name].rounds * ceil(ceil(rows[stage.name].rows / layout.data) / texts_per_pass)
        for stage in traced.stages
        if any(each.kind == "score" for each in stage.passes(recipe))
    )
    count = count_parameters(replace(shape, tied_embeddings=True)) + shape.hidden_size
    return RewardModelPlan(model.path, model.dtype, layout.describe(), shape.family, count, most, passes)


def _train(recipe: Recipe, choose: StepFunctionAt) -> DataPlan:
    rows, rounds = rows_of(recipe.data.train), [0, 0]
    for steps, traced in traces(recipe, choose).items():
        for most in (False, True):
            of_stages = stage_rows(traced, recipe, most=most).values()
            rounds[most] += len(steps) * max(each.rounds for each in of_stages)
    least, highest = (number * recipe.rollout.prompts_per_round for number in rounds)
    return DataPlan(recipe.data.train.named, rows, highest, highest / rows if rows else None, least)


def _batch(recipe: Recipe, choose: StepFunctionAt) -> BatchPlan:
    rollout = recipe.rollout
    sequences = sizes.sequences_per_step(recipe)
    traced = trace_at(recipe, recipe.steps, choose)
    generates = [call for call in traced.calls if any(each.kind == "generate" for each in call.stage.passes(recipe))]
    least, most = (stage_rows(traced, recipe, most=most) for most in (False, True))
    fewest, highest = (sum(rows[call.stage.name].total for call in generates) for rows in (least, most))
    window = sizes.window_tokens(rollout, sizes.response_tokens(recipe))
    new_tokens = rollout.tokens_per_step or rollout.max_new_tokens
    return BatchPlan(
        steps=recipe.steps,
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        sequences_per_step=sequences,
        window_tokens=window,
        new_tokens_per_step_max=highest * new_tokens,
        new_tokens_per_step_min=fewest * new_tokens,
        prompts_per_round=rollout.prompts_per_round,
        rounds_min=max(least[call.stage.name].rounds for call in generates),
        rounds_max=max(most[call.stage.name].rounds for call in generates),
        tokens_per_step_max=sequences * window,
    )


def _role(recipe: Recipe, role: str, table: TrainedTable) -> RolePlan:
    per_step, total = sizes.updates_per_step(recipe, role), sizes.planned_updates(recipe, role)
    minibatch = sizes.minibatch_seqs(recipe, role)
    layout = layouts(recipe)[role]
    fewest, most = microbatches(recipe, role, sizes.longest_sequence(recipe))
    key, limit = sizes.microbatch_limit(table.batching, with_gradient=False)
    rate, warmup = learning_rate_of(recipe, role), sizes.warmup_updates(recipe, role)
    part = trained_part(recipe, role)
    return RolePlan(
        layout=layout.describe(),
        data_ranks=layout.data,
        epochs=sizes.epochs(recipe, role),
        minibatch_seqs=minibatch,
        minibatches_per_epoch=per_step // sizes.epochs(recipe, role),
        updates_per_step=per_step,
        updates_per_step_min=sizes.updates_per_step(recipe, role, rounds=sizes.fewest_rounds(recipe)),
        updates_total=total,
        updates_total_min=sizes.fewest_updates(recipe, role),
        warmup_updates=warmup,
        warmup_steps=warmup / per_step,
        lr_first=rate.at(0),
        lr_peak=rate.peak,
        lr_last=rate.at((total - 1) // sizes.updates_per_tick(recipe, role)),
        microbatches_per_minibatch_min=fewest,
        microbatches_per_minibatch_max=most,
        recompute=table.recompute,
        forward_microbatch=f"{limit:,} {'tokens' if 'tokens' in key else 'sequences'}",
        parameters=part.parameters,
        trained_parameters=part.trained_parameters,
        trained_part=part.text,
        replayed_updates_max=per_step * min(recipe.checkpoint.every_steps, recipe.steps),
    )


def _evaluation(recipe: Recipe, sets: dict[str, DataPlan]) -> EvalPlan:
    rows = [table.rows for table in sets.values()]
    known = [number for number in rows if number is not None]
    responses = sum(known) * recipe.eval.responses_per_prompt if len(known) == len(rows) else None
    return EvalPlan(tuple(step for step in range(recipe.steps + 1) if evaluates(recipe, step)), responses)
