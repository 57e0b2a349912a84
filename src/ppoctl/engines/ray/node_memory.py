"""Memory of the nodes of an existing Ray cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ppoctl.engines.ray.cluster import join

ANSWER_S = 60.0
"""Seconds to wait for a node's report of its GPU memory."""


@dataclass(frozen=True)
class NodeMemory:
    """Memory of all nodes of a Ray cluster."""

    host_bytes: int
    """Host memory that Ray may allocate, summed over all nodes."""
    gpu_gib: float | None
    """Memory of the smallest GPU in GiB. None: no node has a GPU."""


def memory_of_nodes(address: str, gpu_gib: Callable[[], float | None]) -> NodeMemory:
    """Return the memory of the nodes of the Ray cluster at `HOST:PORT`; `gpu_gib` returns the GPU memory of a node,
    and is called on each node that has GPUs. Raises EnvironmentProblemError if no cluster answers."""
    join(address)
    try:
        nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        with_gpus = [node["NodeID"] for node in nodes if node["Resources"].get("GPU")]
        query: Any = ray.remote(num_cpus=0, num_gpus=0)(gpu_gib)
        strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in with_gpus]
        sizes = ray.get([query.options(scheduling_strategy=node).remote() for node in strategies], timeout=ANSWER_S)
        host = sum(int(node["Resources"].get("memory", 0)) for node in nodes)
        return NodeMemory(host, min((size for size in sizes if size is not None), default=None))
    finally:
        ray.shutdown()
