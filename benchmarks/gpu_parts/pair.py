"""Two ranks on two GPUs, or in a dry run two processes that communicate over gloo: trainer, weights, engine."""

import importlib.util
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpu_parts.lines import Skipped, notify
from gpu_parts.measure import CUDA, TINY, gap, gib
from gpu_parts.models import QUICKSTART, minibatch_of, objective_of
from gpu_parts.pair_rank import KEY
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.records import State
from ppoctl.core.machine.device import VISIBLE
from ppoctl.core.ports import SamplingParams
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.child.process import ChildFactory, ChildProcess, ChildReply
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ManyProcesses
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.engines.ray import shared_memory
from ppoctl.engines.weights.broadcast_groups import BroadcastWay
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.loopback import environment
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerSide
from ppoctl.plan.memory.assumptions import COMMUNICATOR_BYTES, COMMUNICATORS

BUCKET_BYTES = 2**20
DEADLINE_S = 60.0
LAYOUTS = {"one rank": ParallelTable(), "data 2": ParallelTable(data=2), "tensor 2": ParallelTable(tensor=2)}
LEARNING_RATE = 1e-3
"""Large, so that the changes of float32 weights have several digits."""


@dataclass(frozen=True)
class Updated:
    """Result of one update."""

    loss: float
    grad_norm: float
    changes: dict[str, Tensor]
    """Change of each weight."""
    outside_bytes: int | None
    """Memory of the fullest GPU that is not torch's; None without a GPU."""


@dataclass
class Replies:
    """Pending results of several processes (`weights.engine_calls.Reply`)."""

    replies: Sequence[ChildReply]
    found: list[Any] | None = None

    def answers(self) -> list[Any]:
        if self.found is None:
            self.found = [reply.answers()[0] for reply in self.replies]
        return self.found


@dataclass(frozen=True)
class Processes:
    """Child processes, as a trainer (`weights.engine_calls.Executor`) or as an engine (`EngineHandle`)."""

    children: Sequence[ChildProcess]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.begin(method, *arguments).answers()

    def call_ranks(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        return self.begin(method, *arguments, ranks=ranks).answers()

    def begin(self, method: str, *arguments: Any, ranks: Sequence[int] | None = None) -> Replies:
        called = self.children if ranks is None else [self.children[rank] for rank in ranks]
        return Replies([child.begin(method, *arguments) for child in called])

    def nodes(self) -> Sequence[str]:
        return ["here"] * len(self.children)

    def close(self) -> None:
        for child in self.children:
            child.close()


def in_one_group(entry: str, arguments: tuple[Any, ...], size: int) -> Processes:
    """Start processes that form a group, each on its own GPU. `entry` gets the arguments, the rank, the size and the
    address at which the processes meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return Processes(
        [
            child_on(rank, f"rank {rank} of {size}", ChildFactory(entry, (*arguments, rank, size, address), 1))
            for rank in range(size)
        ]
    )


def child_on(number: int, name: str, target: ChildFactory) -> ChildProcess:
    """Start a child process that sees only this GPU of those that this process sees."""
    shown = os.environ.get(VISIBLE) or ",".join(map(str, range(torch.cuda.device_count())))
    child = ChildProcess(name, target)
    with environment(VISIBLE, shown.split(",")[number] if CUDA else ""):
        child.start()
    return child


def pair() -> None:
    """Report an update of the quickstart's model on two ranks next to one, and the memory of communicators next to
    `plan`'s estimate. Report also a reduction in each group, a broadcast of the weights, and an engine with two
    ranks."""
    if CUDA and torch.cuda.device_count() < 2:
        raise Skipped("two GPUs are needed, one is visible")
    multiprocessing.current_process().authkey = KEY
    alone: Updated | None = None
    for layout in LAYOUTS:
        with trainer(layout) as (actor, processes):
            updated = update(actor, processes)
            alone = alone or updated
            if len(processes.children) > 1:
                report_update(layout, updated, alone)
                report_groups(layout, processes)
                report_broadcast(layout, actor)
    if importlib.util.find_spec("vllm") is None:
        notify("pair", engine="no vllm")
    else:
        report_engine()


@contextmanager
def trainer(layout: str):
    """Context with a started actor in this layout, and its processes."""
    parallel = LAYOUTS[layout]
    batching = ByTokens(max_tokens_per_microbatch=256)
    settings = TrainerSettings(
        "actor", str(QUICKSTART), torch.float32, batching, parallel=parallel, collective_s=DEADLINE_S
    )
    processes = in_one_group("gpu_parts.pair_rank:PairRank", (settings,), parallel.world_size)
    try:
        actor = MegatronActor(settings, ManyProcesses(processes, parallel, BUCKET_BYTES, lambda: ["here"]))
        actor.start()
        yield actor, processes
    finally:
        processes.close()


def update(actor: MegatronActor, processes: Processes) -> Updated:
    """Take one optimizer step. All ranks must hold the same weights after it."""
    import roofline

    sequences = roofline.made_up_sequences(16 if TINY else 64, 16, 64, 500)
    minibatch = minibatch_of(sequences)
    minibatch = replace(minibatch, step=replace(minibatch.step, lr=LEARNING_RATE))
    before = processes.call("tensors")[0]
    [result] = actor.update(sequences, [minibatch], objective_of(sequences))
    after, *others = processes.call("tensors")
    for other in others:
        same = all(torch.equal(tensor, other[name]) for name, tensor in after.items())
        notify("pair", ranks="hold the same weights", right=same)
    outside = [size for size in processes.call("outside_bytes") if size is not None]
    changes = {name: tensor - before[name] for name, tensor in after.items()}
    return Updated(result.loss, result.grad_norm, changes, max(outside, default=None))


def report_update(layout: str, updated: Updated, alone: Updated) -> None:
    """Report the gaps to the same update on one rank, and the memory that only a process of several has."""
    ours, theirs = (torch.cat([change.flatten() for change in each.changes.values()]) for each in (updated, alone))
    loss = abs(updated.loss / alone.loss - 1)
    grad_norm = abs(updated.grad_norm / alone.grad_norm - 1)
    notify(
        "pair",
        layout=layout,
        loss_gap=float(f"{loss:.3g}"),
        grad_norm_gap=float(f"{grad_norm:.3g}"),
        change_gap=float(f"{gap(ours, theirs):.3g}"),
    )
    if updated.outside_bytes is not None and alone.outside_bytes is not None:
        nccl = gib(updated.outside_bytes - alone.outside_bytes)
        notify("pair", layout=layout, nccl_gib=nccl, plan_nccl_gib=gib(COMMUNICATORS * COMMUNICATOR_BYTES))


def report_groups(layout: str, processes: Processes) -> None:
    """Report the seconds until the groups existed, and a sum over each."""
    joined = max(processes.call("joined_s"))
    for reduced in processes.call("reduce_in_groups"):
        notify(
            "pair",
            layout=layout,
            joined_s=round(joined, 2),
            groups={name: round(seconds, 4) for name, (_, seconds) in reduced.items()},
            right=bool(reduced) and all(right for right, _ in reduced.values()),
        )


def report_broadcast(layout: str, actor: MegatronActor) -> None:
    """Report two broadcasts to a receiver on the second GPU, whose checksums must be those of the trainer. The second
    uses the group of the first."""
    receiver = Processes([child_on(1, "the receiver", ChildFactory("gpu_parts.receiver:Receiver", (), 1))])
    side = EngineSide([receiver], lambda replies: replies[:1], BroadcastWay(lambda: "127.0.0.1", DEADLINE_S, 1))
    sync = Sync(lambda state: trainer_at(actor, state), side, Canary.of("float32", 64, None))
    try:
        for number in (1, 2):
            began = time.perf_counter()
            state = State("actor", number, number, f"state {number}")
            sync.prepare([receiver], trainer_at(actor, state), state)
            took = round(time.perf_counter() - began, 3)
            [size] = receiver.call("size")
            notify("pair", layout=layout, broadcast=number, broadcast_s=took, bytes=size, right=size > 0)
    finally:
        sync.close()
        receiver.close()


def trainer_at(actor: MegatronActor, state: State) -> TrainerSide:
    """Return the trainer's side of a transfer. Like the receiver, it scores every token with 0."""
    return TrainerSide(lambda: actor.weights(state), lambda tokens: [0.0] * (len(tokens) - 1), actor.export)


def report_engine() -> None:
    """Report the start of an engine with two tensor ranks, and its responses: both ranks return the same."""
    from gpu_parts.engines import settings_of
    from ppoctl.engines.vllm.engine import GenerationRequest

    settings = settings_of("float32")
    settings = replace(settings, table=settings.table.model_copy(update={"tensor": 2}))
    new_tokens = 8 if TINY else 64
    params = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    requests = [
        GenerationRequest(f"draw {number}", tuple(2 + number + place for place in range(8)), number)
        for number in range(8)
    ]
    began = time.perf_counter()
    processes = in_one_group("gpu_parts.pair_rank:EngineRank", (settings, str(QUICKSTART)), 2)
    segments: list[str] = []
    try:
        segments = [name for names in processes.call("segments") for name in names]
        processes.call("restart", str(QUICKSTART))
        started, began = time.perf_counter() - began, time.perf_counter()
        ended: list[Any] = []
        right = True
        while len(ended) < len(requests):
            ours, theirs = processes.call("advance", [] if ended else requests, params)
            right = right and ours == theirs and bool(ours)
            ended += ours
        took = time.perf_counter() - began
        right = right and all(len(output.tokens) == new_tokens for output in ended)
        notify(
            "pair", engine="tensor 2", start_s=round(started, 1), responses=len(ended), s=round(took, 2), right=right
        )
    finally:
        processes.close()
        shared_memory.remove(segments)
