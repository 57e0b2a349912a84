"""An offloaded role computes the same results, and leaves nothing on the device between its calls."""

from collections.abc import Callable
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from layout_lab import settings_of, trainer
from rank_pool import RankPool
from safetensors.torch import load_file
from torch import Tensor

from ppoctl.core.errors import OutOfMemoryError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron import optimizer
from ppoctl.engines.megatron.offload import HostOffload, side_by_side
from ppoctl.engines.megatron.pinned_memory import PinnedMemory, PinnedStaging
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronTrainer
from tolerance import EXACT

LAYOUTS = ("alone", "DP2 sharded", "TP2 PP2 interleaved")
HUNDRED_MIB = 100 * 2**20
DTYPES = ["float32", "bfloat16"]


def test_offloaded_views_are_restored_with_shared_storage():
    memory, buffer = HostOffload(), torch.arange(6.0)
    view, whole = buffer[2:4], torch.nn.Parameter(torch.ones(3))
    memory.offload("weights", [view, buffer, whole])
    assert [t.untyped_storage().nbytes() for t in (buffer, view, whole)] == [0, 0, 0]
    memory.reload("training")  # nothing was offloaded
    memory.reload("weights")
    memory.reload("weights")  # it is on the device
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]
    assert view.tolist() == [2, 3]
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert whole.tolist() == [1, 1, 1]


def test_shared_storage_reloads_with_group_that_offloaded_first():
    memory, weight = HostOffload(), torch.ones(3)
    memory.offload("weights", [weight])
    memory.offload("training", [weight.view(3)])
    memory.reload("training")
    assert weight.untyped_storage().nbytes() == 0
    memory.reload("weights")
    assert weight.tolist() == [1, 1, 1]


def test_discarded_tensors_reload_as_zeros():
    memory, gradients = HostOffload(), torch.ones(3)
    memory.offload("training", [gradients], keep=False)
    memory.reload("training")
    assert gradients.tolist() == [0, 0, 0]


def test_host_memory_is_allocated_once_and_reused_per_offload():
    memory, weights = HostOffload(), [torch.arange(300.0), torch.ones(5)]
    for number in range(3):
        memory.offload("weights", weights)
        assert memory.bytes == 1280 + 256, "300 and 5 float32, each from a multiple of 256 bytes on"
        memory.reload("weights")
        assert weights[0].tolist() == [index + number for index in range(300)]
        weights[0] += 1


def test_grown_group_gets_larger_host_memory():
    memory, first, later = HostOffload(), torch.full((64,), 3.0), torch.full((640,), 5.0)
    memory.offload("training", [first])
    memory.offload("training", [first, later])  # created while the others were offloaded
    memory.reload("training")
    memory.offload("training", [later, first])
    memory.reload("training")
    assert memory.bytes == 2560 + 256
    assert (first.unique().tolist(), later.unique().tolist()) == ([3.0], [5.0])


def test_host_memory_of_7b_model_matches_its_bytes():
    """Weights of Qwen2.5-7B on one of four tensor ranks: bytes requested page by page, compared with torch's own
    pinned memory, which takes powers of two."""
    hidden, ffn, vocabulary = 3584, 18944 // 4, 152064 // 4
    attention = [1152 * hidden, 1152, hidden * 896]
    layer = [hidden, *attention, hidden, 2 * ffn * hidden, hidden * ffn]
    sizes = [2 * numbers for numbers in [vocabulary * hidden, *layer * 28, hidden, vocabulary * hidden]]
    needed = sum(sizes)
    assert needed / 2**30 == pytest.approx(3.55, abs=0.01)
    requested_bytes = PinnedMemory(side_by_side(sizes)[-1], torch.device("cpu")).bytes.nbytes
    assert needed <= requested_bytes <= 1.02 * needed
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.1 * needed


class Cudart:
    """CUDA's two calls, which only count; `code` is the result of pinning."""

    def __init__(self, code: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.code = code

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        assert flags == 0
        self.locked[place] = size
        return self.code

    def cudaHostUnregister(self, place: int) -> None:
        del self.locked[place]


def test_gpu_host_memory_is_pinned_for_its_lifetime(monkeypatch):
    cuda = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    memory = PinnedMemory(5000, torch.device("cuda"))
    assert cuda.locked == {memory.bytes.data_ptr(): 5000}
    del memory
    assert cuda.locked == {}


def test_failed_pinning_raises_error_with_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(code=2))
    with pytest.raises(OutOfMemoryError, match="cannot provide 5000 bytes for offloaded GPU memory: CUDA error 2"):
        PinnedMemory(5000, torch.device("cuda"))


@pytest.mark.parametrize("count", [1, 24, 25, 77])
def test_pinned_staging_copies_tensor_through_small_buffers(count):
    tensor = torch.arange(2 * count, dtype=torch.bfloat16)[::2]
    copy = PinnedStaging(torch.device("cpu"), size=48).copied(tensor)
    assert torch.equal(copy, tensor)
    tensor += 1
    assert not torch.equal(copy, tensor), "a copy"


def device_bytes(rank: MegatronRank) -> int:
    """Return the bytes of weights, gradients, optimizer and reference on the device."""
    tensors = [weight for model in rank.models for weight in model.parameters()]
    tensors += rank._reference.weights()
    tensors += [*optimizer.gradient_buffers(rank.stages), *optimizer.held_tensors(rank.optimizer)]
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def lived(pool: RankPool, actor: MegatronTrainer, folder: Path, rest: Callable[[], None]) -> dict[str, Tensor]:
    """Run every call of an actor, offloading it after each."""
    assert isinstance(actor, MegatronActor)
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts, needs_entropy=True)
    found: dict[str, Tensor] = {}
    actor.start()
    for number in range(2):
        rest()
        found[f"{number} old"], found[f"{number} entropy"] = lab.scores(actor, rollouts, 0.8)
        rest()
        found[f"{number} reference"] = actor.reference_logprobs(rollouts, OutputRequest(temperature=0.8))
        rest()
        (result,) = actor.update(rollouts, [lab.minibatch(rollouts)], objective)
        found[f"{number} norm"] = torch.tensor(result.grad_norm)
        rest()
    (folder / "state").mkdir(parents=True)
    saving = actor.save(folder / "state", in_background=True)
    rest()  # while it is being written
    saving.finish()
    actor.load(folder / "state")
    rest()
    (folder / "export").mkdir()
    actor.save_weights(folder / "export")
    found |= {f"exported {name}": tensor for name, tensor in load_file(folder / "export/model.safetensors").items()}
    rest()
    return found | {f"weight {name}": tensor.clone() for name, tensor in pool.tensors()}


# One dtype for each layout, and both dtypes, wherever the subset begins.
LIVES = [(layout, dtype) for number, layout in enumerate(LAYOUTS) for dtype in DTYPES[:: 1 - number % 2 * 2]]


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(("layout", "dtype"), LIVES, ids=[f"{layout}-{dtype}" for layout, dtype in LIVES])
def test_offload_after_each_call_does_not_change_results(pool, model, tmp_path, layout, dtype):
    made_from = settings_of(model, "qwen2-deep", layout, dtype=getattr(torch, dtype))
    expected = lived(pool, trainer(pool, made_from), tmp_path / "stays", lambda: None)
    assert min(pool.examine(device_bytes)) > 100_000
    left = []

    def leave() -> None:
        pool.call("offload")
        left.append(max(pool.examine(device_bytes)))

    found = lived(pool, trainer(pool, made_from), tmp_path / "leaves", leave)
    assert set(left) == {0}
    lab.check_all(EXACT, found, expected)


def test_reload_restores_only_needed_tensors(model):
    actor = lab.actor(model("qwen2"))
    rank, rollouts = lab.rank_of(actor), lab.make_rollouts()
    everything = device_bytes(rank)
    weights = sum(weight.nbytes for weight in rank.models[0].parameters())
    # Float32: besides the weights there are gradients, two moments, and a step count per parameter.
    assert everything == 4 * weights + 4 * len(list(rank.models[0].parameters()))
    rank.offload()
    lab.scores(actor, rollouts)
    assert device_bytes(rank) == weights
    actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    assert device_bytes(rank) == everything
    rank.offload()
    actor.reference_logprobs(rollouts, OutputRequest())
    assert device_bytes(rank) == weights  # the reference's
    rank.offload()
    assert device_bytes(rank) == 0


def test_offloaded_role_can_start_again(model):
    actor = lab.actor(model("qwen2"))
    rank, rollouts, expected = lab.rank_of(actor), lab.make_rollouts(), lab.weights_of(actor)
    actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    everything = device_bytes(rank)
    rank.offload()
    actor.start()
    lab.check_all(EXACT, lab.weights_of(actor), expected)
    assert device_bytes(rank) == everything


def test_unstarted_role_offloads_without_error(model):
    lab.rank_of(lab.unstarted(lab.actor(model("qwen2")).settings)).offload()


def test_reload_of_an_offloaded_role_counts_as_waiting_in_its_pass(model, tmp_path):
    """The rank is in this process. A save also reloads the role, which no stage waits for."""
    actor = lab.actor(model("qwen2"))
    rank, rollouts = lab.rank_of(actor), lab.make_rollouts()
    MEASUREMENTS.take()
    actor.logprobs(rollouts, OutputRequest())
    stays = MEASUREMENTS.take()
    rank.offload()
    actor.save(tmp_path, in_background=False).finish()
    actor.logprobs(rollouts, OutputRequest())
    saved = MEASUREMENTS.take()
    rank.offload()
    actor.logprobs(rollouts, OutputRequest())
    leaves = MEASUREMENTS.take()
    assert max(stays.moved_s, saved.moved_s) < leaves.moved_s < leaves.passes[0].seconds
    torch.ones(3 * HUNDRED_MIB, dtype=torch.uint8, device=rank.device)  # before the pass, so not in its peak
    actor.logprobs(rollouts, OutputRequest())
    peaks = [measured.peak_bytes for measured in (*leaves.passes, *MEASUREMENTS.take().passes)]
    assert device_bytes(rank) < peaks[0]
    assert abs(peaks[1] - peaks[0]) < HUNDRED_MIB
