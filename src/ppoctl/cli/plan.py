"""`ppoctl plan`: what a run requires, computed before it starts. Prints six lines, or all numbers with `--full`."""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ppoctl.cli import plan_fit, plan_summary, render, submission, summary
from ppoctl.cli.options import Assets, FitGib, GpuGib, Gpus, Here, JsonOption, Recipes, Runs, Sets
from ppoctl.cli.plan_memory import print_memory
from ppoctl.core import units
from ppoctl.core.clock import duration
from ppoctl.core.errors import RecipeError, as_typed, quoted

if TYPE_CHECKING:
    from ppoctl.plan.run_plan import BatchPlan, CriticStart, DataPlan, Plan, RewardModelPlan, RolePlan
    from ppoctl.plan.transfer import TransferPlan
    from ppoctl.recipe.schema import Recipe

PlanRow = tuple[str, str]


def plan(
    files: Recipes,
    sets: Sets = None,
    gpu_gib: GpuGib = None,
    here: Here = False,
    assets: Assets = False,
    fit: FitGib = None,
    gpus: Gpus = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also print batch sizes, schedules, data, and memory by role and stage.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="Only print the batch script that `train --on slurm` submits.")
    ] = False,
    runs: Runs = summary.RUNS,
    json: JsonOption = False,
) -> None:
    """Print what a run requires, without starting the run. Prints six lines: memory, GPUs, disk, updates,
    checkpoints, and what was not checked. Exits with code 7 if the run does not fit in the memory of --gpu-gib
    or --here, or if --fit finds no settings that fit."""
    from ppoctl.plan.memory.estimate import misfit
    from ppoctl.plan.run_plan import plan as plan_of
    from ppoctl.run.startable import examined

    if gpus is not None and fit is None:
        raise RecipeError(
            f"`--gpus {gpus}` requires `--fit`: the layout of a recipe sets its number of GPUs",
            hint=f"{as_typed('plan', files, sets or ())} --fit 80 --gpus {gpus}",
        )
    if here and gpu_gib is None:
        from ppoctl.start.preflight.resource_checks import gpu_gib_here

        gpu_gib = gpu_gib_here()
    device = None if gpu_gib is None and fit is None else "gpu"
    loaded, findings = examined(files, sets or (), render.messages(), strict=assets, device=device)
    if sbatch:
        again = "" if runs == summary.RUNS else f" --runs {quoted(runs)}"
        submission.print_script(loaded.recipe, runs, f"{as_typed('train', files, sets or ())} --on slurm{again}")
        return
    if fit is not None:
        plan_fit.print_proposals(files, sets or (), loaded, fit, gpus, as_json=json)
        return
    planned = plan_of(loaded.recipe, gpu_gib)
    if json:
        render.json({**planned.as_dict(), "findings": [finding.as_json() for finding in findings]})
    elif full:
        print_full(loaded.recipe, planned)
    else:
        plan_summary.print_summary(planned, on_gpus=gpu_gib is not None)
    is_judged = here or gpu_gib is not None
    if planned.memory is not None and is_judged:
        too_much = misfit(planned.memory, as_typed("plan", files, sets or ()))
        if too_much is not None:
            raise too_much


def print_full(recipe: "Recipe", planned: "Plan") -> None:
    """Print all numbers of the plan, with one column for each trained role in the sections about roles."""
    render.heading(f"{planned.name}: {planned.batch.steps} {planned.called} steps")
    _section("one step", _batch_rows(planned))
    _section("algorithm", iter(planned.algorithm.items()))
    _section("rewards, step by step", iter(planned.rewards.items()))
    _section("processes", _process_rows(recipe, planned))
    if planned.critic_start is not None:
        _section("critic starts from", _critic_rows(planned.critic_start))
    if planned.reward_models:
        _section("reward models", _reward_model_rows(planned.reward_models))
    parts = [(role, plan_summary.trains(of)) for role, of in planned.roles.items() if of.trained_part]
    if parts:
        _section("trained part of each model", iter(parts))
    _section("updates", _role_rows(planned.roles.values()), ("", "", *planned.roles))
    _section("data", _data_rows(planned))
    _section("disk", _storage_rows(planned))
    if planned.memory is not None:
        print_memory(recipe, planned.memory)
        return
    render.line()
    render.heading("memory")
    render.line("  unknown: the model's config.json is not on this machine (`--set model.path` names a local one)")


def _section(name: str, rows: "Iterator[tuple[str, ...]]", headers: tuple[str, ...] = ()) -> None:
    render.line()
    render.heading(name)
    render.table([("", *row) for row in rows], headers)


def _batch_rows(planned: "Plan") -> Iterator[PlanRow]:
    batch = planned.batch
    prompts = f"{batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples"
    several = batch.rounds_max > 1
    yield "sequences", f"{batch.sequences_per_step} = {prompts}"
    if several:
        each = f"{batch.prompts_per_round} prompts x {batch.samples_per_prompt} samples each"
        yield "rounds", f"{batch.rounds_min} to {batch.rounds_max}, {each}"
    yield "window", f"{batch.window_tokens} tokens"
    yield (
        "generated tokens",
        _at_most(batch, f"{batch.new_tokens_per_step_min:,}", f"{batch.new_tokens_per_step_max:,}"),
    )
    yield "trained tokens", f"at most {batch.tokens_per_step_max:,}, with prompts"
    if (work := planned.work) is not None:
        parts = {"generation": work.drawing, "forward passes": work.forwards, "updates": work.updates}
        shares = ", ".join(f"{name} {part / work.total:.0%}" for name, part in parts.items())
        least = work if planned.work_min is None else planned.work_min
        flops = _at_most(batch, f"{least.total / 1e12:.3g} TFLOP", f"{work.total / 1e12:.3g} TFLOP")
        yield "computation", f"{flops}: {shares}"
        yield "seconds", "not estimated: the speed of this machine is known only after a step has run"
    if planned.transfer is not None:
        yield from _transfer_rows(planned.transfer, planned.devices)


def _transfer_rows(transfer: "TransferPlan", devices: int) -> Iterator[PlanRow]:
    """Yield the bytes of weights for the engines, and seconds with the measurement from which they are estimated."""
    from ppoctl.plan.transfer import SENT_GIB, SENT_S
    from ppoctl.recipe.parallel import GPUS_PER_NODE

    size, is_partial = units.size(transfer.bytes), transfer.later_bytes < transfer.bytes
    yield "transfer", f"{size} first, then {units.size(transfer.later_bytes)}" if is_partial else size
    if transfer.through is not None:
        about = f"{'the first ' if is_partial else ''}about {duration(transfer.seconds)}"
        without = " without the network" if devices > GPUS_PER_NODE else ""
        measured = f"through {transfer.through} in {duration(SENT_S[transfer.through])}"
        yield "", f"{about}{without}: one H100 sent {SENT_GIB} GiB of a dense model {measured}"
    if transfer.restart_seconds is not None:
        restart = f"about {duration(transfer.restart_seconds)} if the engines restart"
        yield "", f"{restart}: only if vLLM computes experts without Triton's kernels"


def _at_most(batch: "BatchPlan", fewest: str, most: str) -> str:
    """Return the upper bound of a step with the fewest and with the most rounds."""
    if batch.rounds_max == 1:
        return f"at most {most}"
    rounds = f"{batch.rounds_min} round{'s' if batch.rounds_min > 1 else ''}"
    return f"at most {fewest} in {rounds}, {most} in {batch.rounds_max}"


def _process_rows(recipe: "Recipe", planned: "Plan") -> Iterator[PlanRow]:
    from ppoctl.recipe.parallel import GPUS_PER_NODE, engine_count

    address, sizes, count = recipe.cluster.ray_address, planned.processes, planned.devices
    if planned.is_one_process:
        yield "all roles", f"in the process of the command; vLLM in {plan_summary.other_processes(planned)}"
        if address is not None:
            yield "Ray", "not started: `cluster.ray_address` is not used"
        return
    for role, table in planned.roles.items():
        idle = table.data_ranks - table.minibatch_seqs
        without = f"; {idle} of its data ranks get no row of a minibatch" if idle > 0 else ""
        yield role, f"{sizes[role]}: {table.layout}{without}"
    engines, per_engine = engine_count(recipe.generator), recipe.generator.tensor
    description = f"{engines} engines share one queue" if engines > 1 else "one engine"
    description += f", each split over {per_engine} processes" if per_engine > 1 else ""
    together = recipe.generator.engines_per_gpu
    description += f", {together} on each device" if together > 1 else ""
    idle = count - sizes["generator"] // together if recipe.cluster.placement == "colocated" else 0
    description += f"; {idle} of {count} devices have no engine" if idle else ""
    yield "generator", f"{sizes['generator']}: {description}"
    yield from ((role, f"{sizes[role]}: {model.layout}") for role, model in planned.reward_models.items())
    shares = {"colocated": "each is shared by one process of every role", "apart": "one for each process"}
    yield "devices", f"{count}: {shares[recipe.cluster.placement]}"
    ray = "started by the run, on this machine" if address is None else f"the cluster at `{address}`"
    on_gpus = planned.memory is not None and planned.memory.device == "gpu"
    if address is None and on_gpus and count > GPUS_PER_NODE:
        ray += "; for several nodes use `--on slurm` or `cluster.ray_address`"
    yield "Ray", ray


def _critic_rows(start: "CriticStart") -> Iterator[PlanRow]:
    size = "not on this machine" if start.parameters is None else f"{start.family}, {start.parameters:,} parameters"
    yield "model", f"{start.path} ({size}, {start.dtype})"
    if (origin := start.saved_by) is not None:
        run = origin.run or "a run whose folder is not present,"
        yield "saved by", f"{run} at step {origin.step}, lineage {origin.lineage[:12]}; its optimizer is not loaded"


def _reward_model_rows(models: Mapping[str, "RewardModelPlan"]) -> Iterator[PlanRow]:
    for key, model in models.items():
        size = (
            "not on this machine" if model.parameters is None else f"{model.family}, {model.parameters:,} parameters"
        )
        yield key, f"{model.path} ({size}, {model.dtype})"
        if model.passes_per_step_max is not None:
            work = f"{model.passes_per_step_max:,} of {model.max_tokens:,} tokens a step"
            yield "", f"texts of at most {model.max_tokens:,} tokens; at most {work} on each data rank"


def _role_rows(roles: "Collection[RolePlan]") -> Iterator[tuple[str, ...]]:
    def each(name: str, show: str = "{}") -> Iterator[str]:
        return (show.format(getattr(role, name)) for role in roles)

    yield "epochs", *each("epochs")
    yield "sequences per minibatch", *each("minibatch_seqs")
    yield "minibatches per epoch", *each("minibatches_per_epoch")
    yield (
        "optimizer steps per step",
        *(_range(role.updates_per_step_min, role.updates_per_step) for role in roles),
    )
    yield "optimizer steps in total", *(_range(role.updates_total_min, role.updates_total) for role in roles)
    yield "warm-up", *map(_warm_up, roles)
    yield "learning rate, first", *each("lr_first", "{:.4g}")
    yield "learning rate, peak", *each("lr_peak", "{:.4g}")
    yield "learning rate, last", *each("lr_last", "{:.4g}")
    yield "microbatches per minibatch", *map(_bounds, roles)
    yield "forward microbatch, maximum", *each("forward_microbatch")
    yield "activation recomputation", *each("recompute")
    yield "replayed by a resume, maximum", *each("replayed_updates_max", "{} updates")


def _warm_up(role: "RolePlan") -> str:
    return f"{role.warmup_updates} updates, {role.warmup_steps:.3g} steps" if role.warmup_updates else "none"


def _bounds(role: "RolePlan") -> str:
    return _range(role.microbatches_per_minibatch_min, role.microbatches_per_minibatch_max)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _data_rows(planned: "Plan") -> Iterator[PlanRow]:
    train = planned.train
    least, most = train.prompts_total_min or 0, train.prompts_total or 0
    up_to = "up to " if least < most else ""
    passes = "" if train.epochs is None else f", {up_to}{train.epochs:.3g} epochs"
    yield "train", f"{_rows(train)}; {_range(least, most)} prompts used{passes}"
    yield from ((f"eval.{name}", _rows(table)) for name, table in planned.eval_sets.items())
    steps = planned.evaluation.at_steps
    shown = ", ".join(map(str, steps if len(steps) <= 8 else (*steps[:4], "...", *steps[-2:])))
    responses = planned.evaluation.responses_per_evaluation
    each = "" if responses is None else f", {responses} responses each"
    yield "evaluations", f"{len(steps)}, at steps {shown}{each}" if steps else "none"


def _rows(table: "DataPlan") -> str:
    return "rows unknown" if table.rows is None else f"{table.rows} rows"


def _storage_rows(planned: "Plan") -> Iterator[PlanRow]:
    storage = planned.storage
    step, kept = units.size(storage.records_bytes), units.size(storage.records_kept_bytes)
    of_step = _at_most(planned.batch, units.size(storage.records_bytes_min), step)
    yield "checkpoints", f"{storage.saves}, of which {storage.keep_last or 'all'} are kept"
    yield (
        "records",
        f"{of_step} a step, {kept} at a time"
        if planned.batch.rounds_max == 1
        else f"of a step: {of_step}; {kept} at a time",
    )
    if storage.states_bytes is None:
        yield "size", "unknown: the model is not a local folder of a known family"
        return
    yield "parameters", f"{storage.parameters:,}"
    by_role = (f"{units.size(size)} {role}" for role, size in storage.state_bytes.items())
    yield "one checkpoint", ", ".join(by_role)
    yield "disk", f"{units.size(storage.states_bytes)}, with one checkpoint being written and one of a stop"
