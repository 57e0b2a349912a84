"""Placement of roles on processes: trainers in this process and engines in child processes, or all of them in
processes of Ray."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ppoctl.core.activity import preparing
from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.core.machine.device import on_gpu
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.plan.memory.driver import object_store_bytes
from ppoctl.recipe.parallel import engine_count, is_one_process, leaving, per_device, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.run.wire.components import OtherProcesses, no_op
from ppoctl.run.wire.prestart import cpu_threads
from ppoctl.start.slurm.allocation import allocation
from ppoctl.start.slurm.script import in_container

if TYPE_CHECKING:
    from ppoctl.engines.megatron.rank_settings import TrainerSettings
    from ppoctl.engines.megatron.ranks import Ranks
    from ppoctl.engines.ray.cluster import RayCluster
    from ppoctl.engines.ray.groups_of_processes import Deadline, RayProcesses
    from ppoctl.engines.ray.srun import JobNodes
    from ppoctl.engines.vllm.pooling import PoolingSettings
    from ppoctl.engines.vllm.vllm_settings import VllmSettings
    from ppoctl.engines.weights.engine_calls import EngineHandle
    from ppoctl.engines.weights.sync import EngineSide

    RankSettings = TrainerSettings | PoolingSettings
    """Settings of one process of a role: a trained role, or a reward model of either engine."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Placed:
    """Placement of each role. A process starts when it is called for the first time."""

    trained: Mapping[str, "Ranks"]
    """Trained role -> its ranks."""
    rewards: Mapping[str, "Ranks"]
    """Key of a reward model's table -> ranks of the reward model."""
    generator: Callable[["VllmSettings", Say], "EngineSide"]
    """Function that builds the generator's side of the weight transfer. Its second argument receives messages about
    waiting."""
    close: Callable[[], None] = no_op
    prestart: Callable[[], None] = no_op
    """Function that starts all processes in parallel. It is called after the generator was built."""
    processes: Callable[[], Mapping[str, OtherProcesses]] = dict
    """See `Components`."""


def place(recipe: Recipe, roles: Mapping[str, "RankSettings"]) -> Placed:
    """Return the placement of the roles of this recipe; `roles` has the settings of each trained role, and of each
    reward model (by the key of its table)."""
    return _in_this_process(recipe, roles) if is_one_process(recipe) else _in_ray(recipe, roles)


def _in_this_process(recipe: Recipe, roles: Mapping[str, "RankSettings"]) -> Placed:
    from ppoctl.engines.child.process import first_done
    from ppoctl.engines.megatron.ranks import DeviceSharingRanks, OpenRank, ThisProcess
    from ppoctl.engines.vllm.own_process import OwnProcess
    from ppoctl.engines.vllm.pooling import OwnPooling, PoolingSettings
    from ppoctl.engines.weights.sync import EngineSide

    sharing, pooling, threads = DeviceSharing(leaving(recipe)), list[OwnPooling](), cpu_threads(recipe)
    others: dict[str, OtherProcesses] = {}

    def ranks(settings: "RankSettings") -> "Ranks":
        if not isinstance(settings, PoolingSettings):
            rank = OpenRank(settings, recipe.cluster.start_deadline_s)(0, 1, "")
            table = recipe.cluster
            process = ThisProcess(rank, table.weights_bucket_mib * 2**20, shares=table.weights != "store")
            return DeviceSharingRanks(process, settings.role, sharing)
        pooling.append(OwnPooling(settings, threads))
        return DeviceSharingRanks(pooling[-1], settings.role, sharing)

    def engine(settings: "VllmSettings", _: Say) -> "EngineSide":
        engines = [OwnProcess(settings, threads, number) for number in range(engine_count(recipe.generator))]
        others.update({f"generator-{number}": own for number, own in enumerate(engines)})

        def begin_on(engine: "EngineHandle", folder: str) -> None:
            if on_gpu():  # vLLM's memory pool for sleep mode can be used only once per process
                engine.close()
                next(own for own in engines if own is engine).folder = folder

        return EngineSide(engines, first_done, sharing=sharing, begin_on=begin_on if settings.sleeps else None)

    def close() -> None:
        for process in pooling:
            process.close()

    return replace(_placed(recipe, roles, ranks, engine, close), processes=lambda: others)


def _placed(
    recipe: Recipe,
    roles: Mapping[str, "RankSettings"],
    ranks: "Callable[[RankSettings], Ranks]",
    generator: "Callable[[VllmSettings, Say], EngineSide]",
    close: Callable[[], None] = no_op,
    prestart: Callable[[], None] = no_op,
) -> Placed:
    ranks_by_role = {role: ranks(settings) for role, settings in roles.items()}
    trained = {role: ranks_by_role.pop(role) for role in recipe.trained}
    return Placed(trained, ranks_by_role, generator, close, prestart)


def _in_ray(recipe: Recipe, roles: Mapping[str, "RankSettings"]) -> Placed:
    from ppoctl.engines.megatron.ranks import DeviceSharingRanks, ManyProcesses, OpenRank
    from ppoctl.engines.ray.cluster import RayCluster
    from ppoctl.engines.ray.groups_of_processes import RayProcesses, first_done
    from ppoctl.engines.ray.placement import DevicePlacement
    from ppoctl.engines.vllm.engine_factories import OpenEngine
    from ppoctl.engines.vllm.pooling import OpenPooling, PoolingSettings
    from ppoctl.engines.weights.broadcast_groups import BroadcastWay
    from ppoctl.engines.weights.sync import EngineSide

    table, sizes = recipe.cluster, processes(recipe)
    together = {role: per_device(recipe, role) for role in sizes}
    placement = DevicePlacement(sizes, table.placement == "colocated", together)
    address = table.ray_address or job_nodes(recipe)
    cluster = RayCluster(placement, address, table.start_deadline_s, object_store_bytes(recipe))
    sharing, fleet, rank_groups = DeviceSharing(leaving(recipe)), list[RayProcesses](), list[RayProcesses]()

    def engine_nodes() -> set[str]:
        return {node for engine in fleet for node in engine.nodes()}

    def ranks(settings: "RankSettings") -> "Ranks":
        role = settings.role
        factories = (
            OpenPooling(settings)
            if isinstance(settings, PoolingSettings)
            else OpenRank(settings, table.start_deadline_s)
        )
        group = _group(recipe, cluster, role, factories, size=sizes[role])
        rank_groups.append(group)
        read_near = engine_nodes if table.weights != "store" else None
        bucket_bytes = table.weights_bucket_mib * 2**20
        return DeviceSharingRanks(ManyProcesses(group, settings.parallel, bucket_bytes, read_near), role, sharing)

    def engines(settings: "VllmSettings", notify: Say) -> "EngineSide":
        cluster.notify, cluster.logs = notify, settings.logs
        size = recipe.generator.tensor
        factories = [OpenEngine(settings, number) for number in range(engine_count(recipe.generator))]
        fleet[:] = [
            _group(recipe, cluster, "generator", factory, size=size, number=number)
            for number, factory in enumerate(factories)
        ]

        def begin_on(engine: "EngineHandle", folder: str) -> None:
            # vLLM's memory pool for sleep mode can be used only once per process.
            if cluster.has_gpus():
                engine.close()
                next(its for its, other in zip(factories, fleet, strict=True) if other is engine).folder = folder

        way = BroadcastWay(cluster.driver_host, table.start_deadline_s, engine_ranks=size)
        return EngineSide(
            fleet,
            first_done,
            way if table.weights == "broadcast" else None,
            sharing,
            cluster.shared_folder,
            begin_on if settings.sleeps else None,
        )

    placed = _placed(recipe, roles, ranks, engines, cluster.close, lambda: _prestart(cluster, fleet, rank_groups))
    return replace(placed, processes=lambda: _by_name(recipe, rank_groups, fleet))


def _by_name(
    recipe: Recipe, rank_groups: "Sequence[RayProcesses]", fleet: "Sequence[RayProcesses]"
) -> dict[str, OtherProcesses]:
    """Return the processes of trained roles by role, and those of engines by number; reward models are left out."""
    trained = {group.group.role: group for group in rank_groups if group.group.role in recipe.trained}
    return {**trained, **{f"generator-{number}": engine for number, engine in enumerate(fleet)}}


def _prestart(cluster: "RayCluster", fleet: "list[RayProcesses]", rank_groups: "list[RayProcesses]") -> None:
    """Start all processes; on shared GPUs, start only Ray, and the processes of engines without the engines.

    An engine on a shared GPU measures the free memory when it starts. The engine must therefore start after the
    trainer has reached its state and was offloaded (`Fleet.prepare`).
    """
    with preparing("starting Ray"):
        cluster.start()
    if cluster.placement.colocated and cluster.has_gpus():
        for engine in fleet:
            engine.prepare()
    else:
        for group in [*fleet, *rank_groups]:
            group.prestart()


def job_nodes(recipe: Recipe) -> "JobNodes | None":
    """Return the nodes of the Slurm job of this process; None: not in a job, or the job has one node.

    Raises SlurmError, or EnvironmentProblemError if this machine is not a node of the job.
    """
    from ppoctl.engines.ray.srun import JobNodes

    job = allocation()
    if job is None or job.node_count == 1:
        return None
    addresses = job.slurm.addresses(job.nodes)
    if job.node not in addresses:
        first = next(iter(addresses))
        raise EnvironmentProblemError(
            f"this machine is not a node of job {job.id} (`{job.nodes}`), but Ray's head must run on a node",
            hint=f"srun --jobid={job.id} --overlap --nodes=1 --ntasks=1 --nodelist={quoted(first)} ppoctl ...",
        )
    options, before = in_container(recipe)
    return JobNodes(job.id, job.node, addresses, tuple(options), tuple(before))


_KEYS = {
    "advance": "draw_deadline_s",
    "forward": "forward_deadline_s",
    "reference_forward": "forward_deadline_s",
    "scores": "forward_deadline_s",
    "update": "update_deadline_s",
    "begin_save": "save_deadline_s",
    "finish_save": "save_deadline_s",
}
"""Method of a process -> key of its deadline."""


def _deadlines(recipe: Recipe) -> "dict[str, Deadline]":
    from ppoctl.engines.ray.groups_of_processes import Deadline

    keys = {method: (getattr(recipe.cluster, key), f"cluster.{key}") for method, key in _KEYS.items()}
    return {method: Deadline(seconds, key) for method, (seconds, key) in keys.items() if seconds is not None}


def _group(
    recipe: Recipe,
    cluster: "RayCluster",
    role: str,
    make: Callable[[int, int, str], object],
    *,
    size: int,
    number: int | None = None,
) -> "RayProcesses":
    from ppoctl.engines.ray.groups_of_processes import GroupSettings, RayProcesses

    group = GroupSettings(
        name=role if number is None else f"{role}'s engine {number}",
        role=role,
        size=size,
        make=make,
        threads=torch.get_num_threads(),
        # Engines of one GPU start one after the other.
        start_deadline_s=recipe.cluster.start_deadline_s * per_device(recipe, role),
        call_deadline_s=recipe.cluster.call_deadline_s,
        first=(number or 0) * size,
        deadlines=_deadlines(recipe),
    )
    return RayProcesses(group, cluster)
