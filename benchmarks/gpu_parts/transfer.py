"""Weight transfer from a trainer to an engine without vLLM: a receiver in plain torch takes its place.

The trainer's side is that of a run: `OpenRank` (which sets expandable segments), `ThisProcess` with device sharing,
`RankSource`, `Sync` and `Fleet`. The receiver is in a `ChildProcess`. Each transfer is verified by checksums.
"""

import time
from dataclasses import dataclass
from functools import partial

import torch

from gpu_parts.lines import notify
from gpu_parts.measure import BF16, CUDA, TINY, fix_allocator, fix_varlen, free_gib, gib, sync
from gpu_parts.models import close_rank, folder, minibatch_of, objective_of, sequences_of
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.records import State
from ppoctl.core.batch.sequences import Sequences
from ppoctl.engines.child.process import ChildFactory, ChildProcess
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import DeviceSharingRanks, OpenRank, ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.sync import EngineSide, Sync, TrainerSide

ROLES = ("actor", "generator")
START_DEADLINE_S = 60.0


@dataclass
class Bench:
    """One trainer and one receiver that share a device in turn."""

    rank: MegatronRank
    actor: MegatronActor
    child: ChildProcess
    fleet: Fleet
    sharing: DeviceSharing

    @staticmethod
    def opened(way: str, bucket_mib: int) -> "Bench":
        batching = ByTokens(max_tokens_per_microbatch=64 if TINY else 8192)
        settings = TrainerSettings("actor", str(folder("1.5b")), BF16, batching)
        rank = OpenRank(settings, START_DEADLINE_S)(0, 1, "")
        sharing = DeviceSharing(ROLES)
        ranks = ThisProcess(rank, bucket_mib * 2**20, shares=way == "shared")
        actor = MegatronActor(settings, DeviceSharingRanks(ranks, "actor", sharing))
        child = ChildProcess("the receiver", ChildFactory("gpu_parts.receiver:Receiver", (), 1))
        side = EngineSide([child], list, sharing=sharing)

        def trainer_at(state: State) -> TrainerSide:
            return TrainerSide(partial(actor.weights, state), lambda tokens: [0.0] * (len(tokens) - 1), actor.export)

        sync = Sync(trainer_at, side, Canary.of("float32", 64, None))
        return Bench(rank, actor, child, Fleet(side, sync, 8, lambda text: notify("transfer", said=text)), sharing)

    def prepare(self, number: int) -> float:
        """Bring the receiver to this state; return the seconds."""
        began = time.perf_counter()
        self.fleet.prepare(State("actor", number, number, f"state {number}"))
        sync()
        return time.perf_counter() - began


def transfer() -> None:
    """Report two transfers with an update between them, restored engines, and the memory that each side frees when
    offloaded; over memory that the GPU shares, and over host memory (`cluster.weights = "store"`)."""
    notify("transfer", allocator=fix_allocator(), varlen=fix_varlen())
    sequences = sequences_of("1.5b", 4, 2048, 4096)
    for way in ("shared", "store"):
        _over(way, sequences)


def _over(way: str, sequences: Sequences) -> None:
    bench = Bench.opened(way, 1 if TINY else 512)
    try:
        _play(way, bench, sequences)
    finally:
        bench.fleet.close()
        close_rank(bench.rank)


def _play(way: str, bench: Bench, sequences: Sequences) -> None:
    nothing_here = _free()
    bench.actor.start()
    _update(bench, sequences)
    trainer_here = _free()
    _report_transfer(way, bench, bench.prepare(1), "first")
    _update(bench, sequences)
    _report_transfer(way, bench, bench.prepare(2), "after an update")
    held = bench.child.call("values")
    # The engine loses its weights, and is restored from the published weights while the trainer remains offloaded.
    awake = _free()
    bench.sharing.offload_others("nobody")
    _report_freed(way, "engine", gib(bench.child.call("forgotten")), awake, _free())
    asleep = bench.child.call("values")
    restored = bench.prepare(2)
    notify("transfer", way=way, restored_s=round(restored, 2), right=bench.child.call("values") == held != asleep)
    # The engine has died, and the next process is brought to the state.
    bench.sharing.offload_others("nobody")
    bench.child.close()
    again = bench.prepare(2)
    notify("transfer", way=way, started_again_s=round(again, 2), right=bench.child.call("values") == held)
    bench.fleet.close()
    took = None if nothing_here is None or trainer_here is None else round(nothing_here - trainer_here, 2)
    _report_freed(way, "trainer", took, trainer_here, _free())


def _update(bench: Bench, sequences: Sequences) -> None:
    bench.actor.update(sequences, [minibatch_of(sequences)], objective_of(sequences))


def _free() -> float | None:
    """Return the free memory of the GPU in GiB, counting torch's cache in this process as free; None without a
    GPU."""
    if CUDA:
        torch.cuda.empty_cache()
    return free_gib()


def _report_transfer(way: str, bench: Bench, seconds: float, which: str) -> None:
    size = bench.child.call("size")
    notify(
        "transfer",
        way=way,
        which=which,
        gib=gib(size),
        s=round(seconds, 3),
        gb_s=round(size / seconds / 1e9, 2),
        read=bench.child.call("read"),
        right=size > 0,
    )


def _report_freed(way: str, who: str, took: float | None, before: float | None, after: float | None) -> None:
    """Report what one side took of the GPU, and how much of it was free after it was offloaded."""
    freed = None if before is None or after is None else round(after - before, 2)
    notify("transfer", way=way, who=who, took_gib=took, freed_gib=freed)
