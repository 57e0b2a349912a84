"""Updates that need less GPU memory: an optimizer on the host, and LoRA."""

import torch

from gpu_parts.lines import notify
from gpu_parts.measure import CUDA, TINY, fix_varlen, gap, gib, record_history
from gpu_parts.models import close_rank, folder, open_rank, sequences_of
from gpu_parts.trainer import timed_update
from ppoctl.engines.weights.sending import PARTS

SEQUENCES = ("1.5b", 8, 8192, 8192)


def optimizer():
    """Report an update with the optimizer on the device, the same with it on the host, how far the weights differ
    after equal steps, and the memory of both next to `plan`'s estimate."""
    fix_varlen()
    record_history()
    sequences = sequences_of(*SEQUENCES)
    ends = {}
    for place in ("device", "cpu"):
        rank = open_rank("1.5b", optimizer_on=place)
        _, peak = timed_update("optimizer", "1.5b", rank, sequences, optimizer=place)
        _compare_with_plan("optimizer", peak, optimizer_on=place)
        ends[place] = {name: tensor.detach().float().cpu() for name, tensor in _weights(rank)}
        notify("optimizer", optimizer=place, host_gib=_pinned_gib(rank))
        close_rank(rank)
    # Both optimizers compute in float32, but by other kernels: a weight can round to its neighbor.
    largest = max(gap(ends["cpu"][name], weight) for name, weight in ends["device"].items())
    notify("optimizer", gap=largest)


def lora():
    """Report an update of adapters next to one of all weights, its memory next to `plan`'s estimate, and whether the
    weights that are sent change with the adapters."""
    from ppoctl.models.lora import Lora
    from ppoctl.models.trainable import Trainable

    fix_varlen()
    record_history()
    sequences = sequences_of(*SEQUENCES)
    trainable = Trainable(lora=Lora(16, 32.0))
    rank = open_rank("1.5b", trainable=trainable)
    before = {name: tensor.detach().float().cpu() for name, tensor in _weights(rank)}
    _, peak = timed_update("lora", "1.5b", rank, sequences, trains="adapters")
    _compare_with_plan("lora", peak, trainable=trainable)
    moved = [name for name, tensor in _weights(rank) if not torch.equal(tensor.detach().float().cpu(), before[name])]
    notify("lora", changed=len(moved), tensors=len(before), right=any("proj" in name for name in moved))
    close_rank(rank)


def _weights(rank):
    for part in rank.weights(PARTS):
        yield from part


def _pinned_gib(rank):
    """Return the pinned host memory of an optimizer on the host."""
    parts = getattr(rank._optimizer, "chained_optimizers", [rank._optimizer])
    memories = [getattr(part.optimizer, "_memory", None) for part in parts]
    return gib(sum(memory.bytes.numel() for memory in memories if memory is not None))


def _compare_with_plan(part, peak, trainable=None, **settings):
    """Report the peak that `plan` estimates for a rank with these settings, next to the measured one."""
    from ppoctl.core.recipe_table import ParallelTable
    from ppoctl.models.model import Model
    from ppoctl.models.shape_reader import read_shape
    from ppoctl.models.trainable import Trainable
    from ppoctl.plan.memory.shard import MicrobatchShape, Precision
    from ppoctl.plan.memory.trainer_memory import Training, ranks_of

    tokens = 16382 if not TINY else 48
    batch = MicrobatchShape(tokens, tokens * 3 // 4, 1024, 8191)
    precision = Precision(2, "gpu" if CUDA else "cpu")
    shape = read_shape(folder("1.5b"))
    plan = ranks_of(
        Training(
            Model(shape, "token", trainable or Trainable()), ParallelTable(), precision, batch, batch, 4, **settings
        )
    )[0]
    notify(part, plan_resident=gib(plan.resident), plan_peak=gib(plan.peak), measured_peak=peak)
