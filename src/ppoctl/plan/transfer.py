"""Bytes of the policy's weights that are sent to the engines, and the seconds that were measured for such transfers.

One H100 sent a dense model of 1.5B parameters to a receiver in the place of vLLM (docs/gpu.md, "The trainer on one
H100"). The estimate of seconds is the bytes of the recipe at that speed. Other devices, the network between nodes,
broadcasts, and mixtures of experts, which have more and smaller tensors, were not measured.
"""

from dataclasses import dataclass
from math import prod

from ppoctl.algorithms.role_model import model_in, model_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.models.convert.adapters import constant_names
from ppoctl.models.convert.tensors import placements
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.estimate import Memory
from ppoctl.recipe.parallel import leaving
from ppoctl.recipe.schema import Recipe

SENT_GIB = 2.9
"""GiB of the model that one H100 sent."""
SENT_S = {"GPU memory": 1.5, "host memory": 4.4}
"""Memory through which the model was sent (`cluster.weights = "shared"` and `"store"`) -> seconds until it was
verified."""
WRITE_GIB_S = 26 / 41
"""GiB/s of files that the same machine wrote (a saved state)."""
ENGINE_START_S = 19.0
"""Seconds in which vLLM started on one H100 with 1.5B parameters and its compiled code cached (docs/gpu.md, "Complete
runs on one H100")."""


@dataclass(frozen=True)
class TransferPlan:
    """The transfer of the policy's weights that precedes a rollout."""

    bytes: int
    """Bytes of all weights, which the first transfer sends."""
    later_bytes: int
    """Bytes that later transfers send: without frozen weights, unless the engines lose theirs (`cluster.offload`)."""
    through: str | None
    """Memory through which weights are sent, a key of `SENT_S`. None: nothing comparable was measured."""
    seconds: float | None
    """Seconds of a transfer of all weights at the measured speed."""
    restart_seconds: float | None
    """Seconds if the engines restart from a folder, because vLLM computes experts with another kernel than Triton's:
    all weights are sent through host memory and written, and vLLM starts. Reading the folder was not measured. None:
    the model has no experts, or runs on a CPU."""


def transfer_of(recipe: Recipe, memory: Memory) -> TransferPlan:
    """Return the transfer of a recipe, whose memory is that of its devices."""
    source, sending = model_of(recipe, POLICY), memory.sending
    assert source.shape is not None, "the memory is known"
    constant = constant_names(model_in(recipe, POLICY, source.shape))
    frozen = sum(prod(each.shape) for each in placements(source.shape, "token") if each.name in constant)
    size = sum(sending.buckets)
    later = size if "generator" in leaving(recipe) else size - frozen * source.weight_bytes
    through, seconds, restart = None, None, None
    if memory.device == "gpu":
        if recipe.cluster.weights != "broadcast":
            through = "host memory" if sending.copies["node"] else "GPU memory"
            seconds = size / GIB / SENT_GIB * SENT_S[through]
        if source.shape.experts is not None:
            gathered = size / GIB / SENT_GIB * SENT_S["host memory"]
            restart = gathered + size / GIB / WRITE_GIB_S + ENGINE_START_S
    return TransferPlan(size, later, through, seconds, restart)
