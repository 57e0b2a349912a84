"""`ppoctl plan`: the numbers of a run, without touching anything."""

from typing import TYPE_CHECKING

from ppoctl.cli import preflight, render
from ppoctl.cli.options import Assets, GpuGib, Here, Json, Recipes, Sets
from ppoctl.cli.plan_memory import print_memory

if TYPE_CHECKING:
    from ppoctl.errors import OutOfMemoryError
    from ppoctl.plan.arithmetic import DataPlan, Plan, RolePlan


def plan(
    files: Recipes,
    sets: Sets = None,
    gpu_gib: GpuGib = None,
    here: Here = False,
    assets: Assets = False,
    json: Json = False,
) -> int | None:
    """Print batch arithmetic, schedules, evaluations, disk and memory of a run; nothing is started or written. Exit
    code 7 where the run does not fit what --gpu-gib or --here name."""
    from ppoctl.plan.arithmetic import plan as plan_of

    if here and gpu_gib is None:
        from ppoctl.preflight.fit import gpu_gib_here

        gpu_gib = gpu_gib_here()
    device = None if gpu_gib is None else "gpu"
    loaded, _ = preflight.examined(files, sets or (), strict=assets, device=device)
    planned = plan_of(loaded.recipe, gpu_gib)
    too_much = _misfit(planned) if here or gpu_gib is not None else None
    if json:
        wrong = {} if too_much is None else {"error": too_much.as_json()}
        render.json({**planned.as_dict(), **wrong})
    else:
        _print(planned)
    if too_much is None:
        return None
    if not json:
        render.error(too_much.message)
        render.hint(too_much.hint or "")
    return int(too_much.exit_code)


def _misfit(planned: "Plan") -> "OutOfMemoryError | None":
    from ppoctl.plan.memory.estimate import misfit

    return None if planned.memory is None else misfit(planned.memory)


def _print(planned: "Plan") -> None:
    batch = planned.batch
    render.heading(f"{planned.name}: {batch.steps} PPO steps")
    render.line()
    render.heading("one step")
    sequences = f"{batch.sequences_per_step} = {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples"
    rows: list[tuple[str, str]] = [
        ("sequences", sequences),
        ("minibatches", f"{batch.minibatches_per_epoch} per epoch, of {batch.minibatch_seqs} sequences"),
        ("window", f"{batch.window_tokens} tokens"),
        ("generated", f"at most {batch.new_tokens_per_step_max:,} tokens"),
        ("trained on", f"at most {batch.tokens_per_step_max:,} tokens, prompts included"),
    ]
    render.table(_indented(rows))
    render.line()
    render.heading("processes")
    render.table(_indented(_process_rows(planned)))
    render.line()
    render.heading("updates")
    render.table([("", *row) for row in _role_rows(planned)], ("", "", "actor", "critic"))
    render.line()
    render.heading("data")
    render.table(_indented(_data_rows(planned)))
    render.line()
    render.heading("disk")
    render.table(_indented(_storage_rows(planned)))
    if planned.memory is not None:
        print_memory(planned.memory)
        return
    render.line()
    render.heading("memory")
    render.line("  unknown: the model's config.json is not here (--set model.path=FOLDER names one that is)")


def _indented(rows: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    return [("", *row) for row in rows]


def _process_rows(planned: "Plan") -> list[tuple[str, str]]:
    found = planned.processes
    if found.is_one_process:
        unused = [] if found.ray_address is None else [("Ray", "none: `cluster.ray_address` is not used")]
        return [("all roles", "in the process of the command"), *unused]
    each = found.generator // found.engines
    split = f", each split over {each} processes" if each > 1 else ""
    engines = f"{found.engines} engines share one queue{split}" if found.engines > 1 else f"one engine{split}"
    shares = {"colocated": "a process of each role shares one", "apart": "each process has one of its own"}
    idle = found.devices - found.generator if found.placement == "colocated" else 0
    engines += f"; {idle} of {found.devices} devices have none" if idle else ""
    return [
        ("actor", _role_processes(planned, planned.actor)),
        ("critic", _role_processes(planned, planned.critic)),
        ("generator", f"{found.generator}: {engines}"),
        ("devices", f"{found.devices}: {shares[found.placement]}"),
        ("Ray", _ray(planned)),
    ]


def _role_processes(planned: "Plan", role: "RolePlan") -> str:
    rows = planned.batch.minibatch_seqs
    idle = (
        f"; {role.data_ranks - rows} of its data ranks have no row of a minibatch" if role.data_ranks > rows else ""
    )
    return f"{role.processes}: {role.layout}{idle}"


def _ray(planned: "Plan") -> str:
    from ppoctl.recipe.parallel import GPUS_PER_NODE

    found = planned.processes
    if found.ray_address is not None:
        return f"the one at `{found.ray_address}`"
    own = "the run's own, on this machine"
    if planned.memory is not None and planned.memory.device == "gpu" and found.devices > GPUS_PER_NODE:
        return f"{own}; several nodes need one that is running, `cluster.ray_address`"
    return own


def _role_rows(planned: "Plan") -> list[tuple[str, str, str]]:
    def both(name: str, show: "str" = "{}") -> tuple[str, str]:
        return show.format(getattr(planned.actor, name)), show.format(getattr(planned.critic, name))

    return [
        ("epochs", *both("epochs")),
        ("optimizer steps per PPO step", *both("updates_per_step")),
        ("optimizer steps in all", *both("updates_total")),
        ("warm-up", _warm_up(planned.actor), _warm_up(planned.critic)),
        ("learning rate, first", *both("lr_first", "{:.4g}")),
        ("learning rate, peak", *both("lr_peak", "{:.4g}")),
        ("learning rate, last", *both("lr_last", "{:.4g}")),
        ("microbatches per minibatch", _bounds(planned.actor), _bounds(planned.critic)),
        ("forward microbatch, at most", *both("forward_microbatch")),
        ("activations computed again", *both("recompute")),
        ("replayed by a resume, at most", *both("replayed_updates_max", "{} updates")),
    ]


def _warm_up(role: "RolePlan") -> str:
    return f"{role.warmup_updates} updates, {role.warmup_steps:.3g} steps" if role.warmup_updates else "none"


def _bounds(role: "RolePlan") -> str:
    low, high = role.microbatches_per_minibatch_min, role.microbatches_per_minibatch_max
    return str(low) if low == high else f"{low} to {high}"


def _data_rows(planned: "Plan") -> list[tuple[str, str]]:
    train = planned.train
    passes = "" if train.epochs is None else f", {train.epochs:.3g} epochs"
    rows = [("train", f"{_rows(train)}; {train.prompts_total} prompts drawn{passes}")]
    rows += [(f"eval.{name}", _rows(table)) for name, table in planned.eval_sets.items()]
    steps = planned.evaluation.at_steps
    shown = ", ".join(map(str, steps if len(steps) <= 8 else (*steps[:4], "...", *steps[-2:])))
    responses = planned.evaluation.responses_per_evaluation
    each = "" if responses is None else f", {responses} responses each"
    rows.append(("evaluations", f"{len(steps)}, at steps {shown}{each}" if steps else "none"))
    return rows


def _rows(table: "DataPlan") -> str:
    return "rows unknown" if table.rows is None else f"{table.rows} rows"


def _storage_rows(planned: "Plan") -> list[tuple[str, str]]:
    storage = planned.storage
    step, kept = render.size(storage.records_bytes), render.size(storage.records_kept_bytes)
    rows = [
        ("saves", f"{storage.saves}, of which {storage.keep_last} pairs are kept"),
        (
            "records",
            f"at most {step} a step, {kept} at one time",
        ),
    ]
    if storage.parameters is None or storage.actor_state_bytes is None or storage.critic_state_bytes is None:
        return [*rows, ("size", "unknown: the model is no local folder of a known family")]
    actor, critic = render.size(storage.actor_state_bytes), render.size(storage.critic_state_bytes)
    gathered = ", ".join(
        f"{render.size(size)} on each rank of the {role}" for role, size in storage.gathered_bytes.items()
    )
    return [
        *rows,
        ("parameters", f"{storage.parameters:,}"),
        ("one pair", f"{actor} actor, {critic} critic"),
        *([("each save", f"gathers {gathered} (with `checkpoint.reshardable = dp` nothing)")] if gathered else []),
        ("disk", f"{render.size(storage.states_bytes or 0)}, one pair being written included"),
    ]
