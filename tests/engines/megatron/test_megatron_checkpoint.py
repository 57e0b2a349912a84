"""A saved state continues exactly; a missing or unexpected item is a storage error."""

import gc
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import megatron_lab as lab
import pytest
import torch
from layout_lab import settings
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ppoctl.core.batch.digest import file_digest
from ppoctl.core.errors import StorageError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron import checkpoint
from ppoctl.engines.megatron.trainer import LOOK_EVERY_S
from tolerance import EXACT

READ = [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
"""Files that a load reads; a start from the weights alone also reads config.json."""
WRITTEN = sorted([*READ, "config.json"])


DTYPES = ["float32", "bfloat16"]


def in_turn(*kinds: str) -> list[tuple[str, str]]:
    """Return each kind with both dtypes, so that every second case covers each kind once, and both dtypes."""
    return [(kind, dtype) for number, kind in enumerate(kinds) for dtype in DTYPES[:: 1 - number % 2 * 2]]


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize(("kind", "dtype"), in_turn("qwen2", "qwen2-tied", "qwen3-moe-mixed"))
def test_resumed_actor_matches_uninterrupted_actor(model, tmp_path, dtype, kind):
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts, needs_entropy=True)
    batches = [lab.minibatch(rollouts, rows) for rows in ([0, 1], [2, 3, 4])]
    straight = lab.actor(model(kind), dtype=dtype)
    straight.update(rollouts, batches, objective)
    lab.save(straight, tmp_path)
    expected = straight.update(rollouts, batches, objective)
    resumed = lab.unstarted(straight.settings)
    resumed.load(tmp_path)
    found = resumed.update(rollouts, batches, objective)
    for one, other in zip(found, expected, strict=True):
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
        EXACT.check(one.outputs.primary, other.outputs.primary)
    lab.check_all(EXACT, lab.weights_of(resumed), lab.weights_of(straight))


def test_resumed_critic_matches_uninterrupted_critic(model, tmp_path):
    rollouts = lab.make_rollouts()
    objective = lab.value_objective(rollouts)
    straight = lab.critic(model("qwen2-tied"), dtype="bfloat16")
    straight.update(rollouts, [lab.minibatch(rollouts)], objective)
    lab.save(straight, tmp_path)
    straight.update(rollouts, [lab.minibatch(rollouts)] * 2, objective)
    # Loaded over a newer state, as happens between roles.
    resumed = lab.critic(model("qwen2-tied"), dtype="bfloat16")
    resumed.update(rollouts, [lab.minibatch(rollouts)] * 3, objective)
    resumed.load(tmp_path)
    resumed.update(rollouts, [lab.minibatch(rollouts)] * 2, objective)
    lab.check_all(EXACT, lab.weights_of(resumed), lab.weights_of(straight))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(("kind", "dtype"), in_turn("llama", "qwen3-moe"))
def test_state_saved_before_first_step_can_be_loaded(model, tmp_path, kind, dtype):
    rollouts = lab.make_rollouts()
    straight = lab.actor(model(kind), dtype=dtype)
    lab.save(straight, tmp_path)
    resumed = lab.unstarted(straight.settings)
    resumed.load(tmp_path)
    for trainer in (straight, resumed):
        trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    lab.check_all(EXACT, lab.weights_of(resumed), lab.weights_of(straight))


def test_start_discards_trained_state(model, tmp_path):
    rollouts = lab.make_rollouts()
    fresh, restarted = lab.actor(model("qwen2")), lab.actor(model("qwen2"))
    restarted.update(rollouts, [lab.minibatch(rollouts)] * 2, lab.policy_objective(rollouts))
    restarted.start()
    for trainer in (fresh, restarted):
        trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    lab.check_all(EXACT, lab.weights_of(restarted), lab.weights_of(fresh))


def test_save_starts_no_process_and_writes_only_torch_dist_files(model, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fork", lambda: pytest.fail("forked"))
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("started a process"))
    lab.save(lab.actor(model("llama")), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == WRITTEN


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model):
    """Return a critic's state after one update, float32."""
    folder = tmp_path_factory.mktemp("saved")
    rollouts = lab.make_rollouts()
    trainer = lab.critic(model("qwen2"))
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    lab.save(trainer, folder)
    return folder


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_state_raises_storage_error(model, saved, tmp_path, name, damage):
    folder = tmp_path / "state"
    shutil.copytree(saved, folder)
    file = folder / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(StorageError, match="state"):
        lab.critic(model("qwen2")).load(folder)


@pytest.mark.parametrize("other", ["role", "dtype", "family", "size"])
def test_state_of_other_model_raises_storage_error(model, saved, other, tmp_path):
    if other == "role":
        trainer = lab.actor(model("qwen2"))
    elif other == "dtype":
        trainer = lab.critic(model("qwen2"), dtype="bfloat16")
    elif other == "family":
        trainer = lab.critic(model("llama"))
    else:
        trainer = lab.critic(lab.wider_vocabulary(tmp_path))
    with pytest.raises(StorageError, match="cannot be read"):
        trainer.load(saved)


def test_state_with_extra_tensor_raises_storage_error(model, tmp_path):
    """An untied model's state has everything that a tied model needs, and also an output layer."""
    lab.save(lab.actor(model("qwen2")), tmp_path)
    with pytest.raises(StorageError, match="tied_embeddings"):
        lab.actor(model("qwen2-tied")).load(tmp_path)


def test_save_to_missing_folder_raises_storage_error(model, tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        lab.save(lab.actor(model("llama")), tmp_path / "nowhere")


def test_bfloat16_state_keeps_float32_main_weights(model, tmp_path):
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model("qwen2"), dtype="bfloat16")
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    main = [p for group in lab.rank_of(trainer).optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in main} == {torch.float32}
    assert any(not torch.equal(p, p.bfloat16().float()) for p in main)
    lab.save(trainer, tmp_path)
    resumed = lab.unstarted(trainer.settings)
    resumed.load(tmp_path)
    for found, expected in zip(
        (p for group in lab.rank_of(resumed).optimizer.param_groups for p in group["params"]), main, strict=True
    ):
        EXACT.check(found, expected)


def test_distributed_optimizer_is_gathered_on_first_data_rank_only(model, tmp_path, monkeypatch):
    """The option of Megatron-Core decides: its default gathers on every rank, through GPU memory."""
    trainer = lab.started(settings(model("qwen2"), "actor", ParallelTable(distributed_optimizer=True)))
    (optimizer,) = lab.rank_of(trainer).optimizer.chained_optimizers
    calls: list[dict[str, bool]] = []
    gather = optimizer.get_parameter_state_dp_zero
    monkeypatch.setattr(optimizer, "get_parameter_state_dp_zero", lambda **how: calls.append(how) or gather(**how))
    lab.save(trainer, tmp_path)
    assert calls == [{"use_gloo_comm": True, "empty_data": False, "return_on_all_ranks": False}]


def digests_on_disk(folder):
    return {path.name: file_digest(path) for path in folder.iterdir()}


@pytest.mark.parametrize("in_background", [False, True])
def test_save_returns_digest_of_every_file(model, tmp_path, in_background):
    trainer = lab.actor(model("qwen2-tied"), dtype="bfloat16")
    written = trainer.save(tmp_path, in_background=in_background).finish()
    assert sorted(written) == WRITTEN
    assert written == digests_on_disk(tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated")
@pytest.mark.parametrize(("is_split", "place"), [(False, "device"), (True, "device"), (False, "cpu")])
def test_background_save_captures_state_at_request_time(model, tmp_path, monkeypatch, is_split, place):
    """Training continues before a byte is written; the files equal those of a synchronous save. The state of a
    distributed optimizer is gathered for the save and not copied again. Its staging memory is released before a byte
    is written."""
    rollouts = lab.make_rollouts()
    objective, batches = lab.policy_objective(rollouts), [lab.minibatch(rollouts)]
    made = settings(model("qwen2"), "actor", ParallelTable(distributed_optimizer=is_split), torch.bfloat16)
    trainer = lab.started(replace(made, optimizer_on=place))
    trainer.update(rollouts, batches, objective)
    folders = [tmp_path / "waited for", tmp_path / "behind"]
    for folder in folders:
        folder.mkdir()
    lab.save(trainer, folders[0])
    may_write = threading.Event()
    write_data = FileSystemWriter.write_data
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *a: may_write.wait() and write_data(*a))
    copies: list[int] = []
    ways: list[weakref.ref[Callable[[torch.Tensor], torch.Tensor]]] = []
    copier = checkpoint._copier

    def watched(*of: object) -> Callable[[torch.Tensor], torch.Tensor]:
        copied = copier(*of)

        def watched_copy(tensor: torch.Tensor) -> torch.Tensor:
            found = copied(tensor)
            copies.append(tensor.numel() if found is not tensor else 0)
            return found

        ways.append(weakref.ref(watched_copy))
        return watched_copy

    monkeypatch.setattr(checkpoint, "_copier", watched)
    saving = trainer.save(folders[1], in_background=True)
    parameters = sum(parameter.numel() for parameter in lab.rank_of(trainer).models[0].parameters())
    assert sum(copies) == (parameters if is_split else 4 * parameters), "weights; main weights and moments too"
    gc.collect()  # a plan of torch may be part of a cycle
    assert [way() for way in ways] == [None], "a GPU's locked memory would live as long as its copier"
    trainer.update(rollouts, batches, objective)
    time.sleep(LOOK_EVERY_S)
    assert not saving.is_written()
    may_write.set()
    saving.finish()
    # `.metadata` is torch's index; it contains the folder's name.
    first, second = ({**digests_on_disk(folder), ".metadata": None} for folder in folders)
    assert first == second


@pytest.mark.parametrize("in_background", [False, True])
def test_full_disk_error_is_clear_and_trainer_can_save_again(model, tmp_path, in_background):
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    trainer = lab.actor(model("llama"))
    saving = trainer.save(tmp_path, in_background=in_background)
    with pytest.raises(StorageError, match=r"state cannot be written to .*No space left on device"):
        saving.finish()
    (tmp_path / "__0_0.distcp").unlink()
    lab.save(trainer, tmp_path, in_background=in_background)
    lab.unstarted(trainer.settings).load(tmp_path)


def test_failed_background_save_counts_as_written(model, tmp_path):
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    saving = lab.actor(model("llama")).save(tmp_path, in_background=True)
    until = time.monotonic() + 30
    while not saving.is_written():
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(StorageError):
        saving.finish()
