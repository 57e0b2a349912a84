"""The six lines of `ppoctl plan`: whether the run fits, what the run requires, and what was not checked. A role that
trains a part of its model, an optimizer on the CPU, and engines that would decode faster add a line."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ppoctl.cli import render
from ppoctl.core import units

if TYPE_CHECKING:
    from ppoctl.plan.memory.estimate import Memory
    from ppoctl.plan.run_plan import Plan, RolePlan


def print_summary(planned: "Plan", *, on_gpus: bool) -> None:
    """Print the six lines. `on_gpus`: whether memory was estimated for GPUs of a known size, or for CPUs."""
    steps, sequences = planned.batch.steps, planned.batch.sequences_per_step
    batch = planned.batch
    rounds = f", from at most {batch.rounds_max} rounds of {batch.prompts_per_round} prompts"
    rounds = rounds if batch.rounds_max > 1 else ""
    render.heading(f"{planned.name}: {steps} {planned.called} steps of {sequences} sequences{rounds}")
    rows = [
        ("memory", _memory(planned.memory)),
        ("GPUs", _gpus(planned, on_gpus=on_gpus)),
        *_engines(planned),
        ("disk", _disk(planned)),
        *(("trains", f"{role} {trains(of)}") for role, of in planned.roles.items() if of.trained_part),
        *_optimizers(planned),
        ("updates", _updates(planned)),
        ("checkpoints", _checkpoints(planned)),
        ("not checked", "; ".join(_not_checked(planned, on_gpus=on_gpus))),
    ]
    render.table([("", *row) for row in rows])
    render.line("  `--full` prints the rest: batch sizes, algorithm, processes, schedules, data, memory by stage")


def _engines(planned: "Plan") -> Iterator[tuple[str, str]]:
    """Yield a line if other engines than those of the recipe probably decode faster."""
    has, advised = planned.engines_per_gpu, planned.advised_engines_per_gpu
    if advised > has:
        yield "engines", f"{has} on a GPU; {advised} decode faster: --set generator.engines_per_gpu={advised}"


def _optimizers(planned: "Plan") -> Iterator[tuple[str, str]]:
    """Yield a line for each role whose optimizer is on the host: its host memory, and the bytes that it moves."""
    for role, of in planned.memory.roles.items() if planned.memory is not None else ():
        rank = max(of.ranks, key=lambda each: each.host_optimizer)
        if rank.host_optimizer:
            held, moved = units.size(rank.host_optimizer + rank.host_staging), units.size(rank.moved)
            yield "optimizer", f"{role} on the CPU: {held} of host memory, {moved} moved per step, in each process"


def _memory(memory: "Memory | None") -> str:
    if memory is None:
        return "unknown: the model's config.json is not on this machine"
    pool = max(memory.places, key=lambda place: place.fullest.bytes)
    stage = pool.fullest
    unfit = next((found.stage for place in memory.places for found in place.stages if found.fits is False), None)
    if pool.room is None:
        return f"{units.size(stage.bytes)} in `{stage.stage}`, the fullest stage, on {pool.name}"
    if unfit is None:
        return f"fits: {units.size(stage.bytes)} of {units.size(pool.room)} in `{stage.stage}`, on {pool.name}"
    if stage.bytes > pool.room:
        return (
            f"does not fit: `{stage.stage}` needs {units.size(stage.bytes)}, {units.size(stage.bytes - pool.room)} "
            f"more than {pool.name} has"
        )
    return f"does not fit: no KV cache for one sequence in `{unfit}`"


def _gpus(planned: "Plan", *, on_gpus: bool) -> str:
    if planned.is_one_process:
        others = other_processes(planned).removesuffix(" process")
        return (
            "1, shared by all roles" if on_gpus else f"not required: all roles run in one process, vLLM in {others}"
        )
    processes = sum(planned.processes.values())
    sharing = f"shared by {processes} processes" if processes > planned.devices else "one for each process"
    return f"{planned.devices}, {sharing}"


def other_processes(planned: "Plan") -> str:
    """Return how many processes vLLM has next to the process of all roles."""
    engines = planned.processes["generator"]
    return "a second process" if engines == 1 else f"{engines} others"


def _disk(planned: "Plan") -> str:
    storage = planned.storage
    records = f"{units.size(storage.records_kept_bytes)} for records of steps"
    if storage.states_bytes is None:
        return f"{records}; checkpoints unknown: the model is not a local folder of a known family"
    return f"{units.size(storage.states_bytes)} for checkpoints, {records}"


def trains(role: "RolePlan") -> str:
    """Return how many of the parameters of a role train, and which."""
    total, trained = role.parameters, role.trained_parameters
    if total is None or trained is None:
        return role.trained_part
    unit, name = _unit(total)
    part = f"{trained / unit:.3g}" if trained >= unit / 10 or trained == 0 else _count(trained)
    return f"{part} of {total / unit:.3g} {name} parameters: {role.trained_part}"


def _unit(number: int) -> tuple[float, str]:
    return (1e9, "billion") if number >= 1e9 else (1e6, "million")


def _count(number: int) -> str:
    unit, name = _unit(number)
    return f"{number / unit:.3g} {name}" if number >= 1e5 else f"{number:,}"


def _updates(planned: "Plan") -> str:
    updates = (
        f"{role} {_up_to(of.updates_total_min, of.updates_total)} "
        f"({_up_to(of.updates_per_step_min, of.updates_per_step)} per step)"
        for role, of in planned.roles.items()
    )
    return ", ".join(updates)


def _up_to(least: int, most: int) -> str:
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def _checkpoints(planned: "Plan") -> str:
    kept = planned.storage.keep_last or "all"
    steps = planned.evaluation.at_steps
    evaluations = f"{len(steps)} evaluations" if len(steps) != 1 else "1 evaluation"
    return f"{planned.storage.saves}, of which {kept} are kept; {evaluations}"


def _not_checked(planned: "Plan", *, on_gpus: bool) -> Iterator[str]:
    if planned.memory is None:
        yield "memory"
    elif on_gpus:
        yield "assumed sizes of CUDA contexts and libraries"
    else:
        yield "memory of GPUs (`--gpu-gib N`)"
    unknown = [name for name, table in {"train": planned.train, **planned.eval_sets}.items() if table.rows is None]
    if unknown:
        yield f"number of rows of {', '.join(unknown)}"
    yield "speed (known after a step)"
