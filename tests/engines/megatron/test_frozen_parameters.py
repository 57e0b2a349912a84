"""Frozen parameters on real ranks: no gradient, no optimizer state, no activations, and states that name their frozen
base. `test_layout_grid.py` compares their steps with those of full training."""

import json
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from layout_lab import CHANGE_GAP, STEP, policy_objective, resumes_under_layout, settings_of, started
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.errors import StorageError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.optimizer import gradient_buffers, held_tensors
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.models.convert.frozen_base import read_frozen_base
from ppoctl.models.trainable import Trainable

TOP = Trainable(top_layers=1)


def only_rank(folder: Path, **settings: object) -> MegatronActor:
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    return lab.started(TrainerSettings("actor", str(folder), torch.float32, batching, **settings))


@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("sharded", [False, True], ids=["usual", "distributed optimizer"])
def test_frozen_parameters_have_no_buffer_no_main_weights_and_no_moments(model, sharded):
    folder = model("qwen2-deep")
    actor = only_rank(folder, trainable=TOP, parallel=ParallelTable(distributed_optimizer=sharded))
    rollouts = lab.make_rollouts()
    actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    rank = lab.rank_of(actor)
    top = ("model.layers.3.", "model.norm.")
    trained = sum(tensor.numel() for name, tensor in lab.weights_in(folder).items() if name.startswith(top))
    buffers = sum(buffer.numel() for buffer in gradient_buffers(rank.stages))
    assert trained <= buffers < trained + 1024, "padding alone"
    held = [tensor.numel() for tensor in held_tensors(rank.optimizer) if tensor.dim() > 0]
    assert sum(held) == 3 * trained, "main weights and two moments"
    frozen = [parameter for parameter in rank.models[0].parameters() if not parameter.requires_grad]
    assert frozen
    assert all(parameter.grad is None and not hasattr(parameter, "main_grad") for parameter in frozen)


def saved_bytes(rank: MegatronRank, *update: object) -> int:
    """Return the bytes that the graphs of an update hold between forward and backward, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for model in rank.models for parameter in model.parameters()}
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rank.update(*update)  # type: ignore[arg-type]
    return sum(kept)


def test_frozen_trunk_keeps_no_activations_on_any_pipeline_rank(pool, model):
    """Six layers, of which the last trains: the first rank keeps nothing, and the last rank keeps the same with five
    layers as with one."""
    rollouts, found = lab.make_rollouts(), []
    for first in (1, 5):
        layout = ParallelTable(pipeline=2, first_stage_layers=first)
        started(pool, settings_of(model, "qwen2-six", "alone", parallel=layout, trainable=TOP))
        update = (rollouts, [lab.minibatch(rollouts, step=STEP)], policy_objective(rollouts))
        found.append(pool.examine(saved_bytes, *update))
    assert [ranks[0] for ranks in found] == [0, 0]
    assert found[0][1] == found[1][1] > 10_000


def test_frozen_trunk_of_one_rank_keeps_no_activations(model):
    """Two layers and six, of which the last trains."""
    rollouts, found = lab.make_rollouts(), []
    for kind in ("qwen2-six", "qwen2"):
        rank = lab.rank_of(only_rank(model(kind), trainable=TOP))
        update = (rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
        found.append(saved_bytes(rank, *update))
    assert found[0] == found[1] > 10_000


@pytest.mark.parametrize(("kind", "layout"), [("qwen2-deep", "TP2 PP2"), ("qwen3-moe", "PP2 EP2 sharded")])
def test_digest_of_frozen_weights_does_not_depend_on_layout(pool, model, tmp_path, kind, layout):
    digests = []
    for name in ("alone", layout):
        (tmp_path / name).mkdir()
        lab.save(started(pool, settings_of(model, kind, name, trainable=TOP)), tmp_path / name)
        base = read_frozen_base(tmp_path / name)
        assert base is not None
        digests.append(base.digest)
    assert digests[0] == digests[1]


def test_dp_reshardable_state_of_empty_pipeline_rank_resumes(pool, model, tmp_path):
    made, one = (
        settings_of(model, "qwen2-deep", layout, trainable=TOP, reshardable="dp")
        for layout in ("DP2 PP2 sharded", "PP2 sharded")
    )
    assert resumes_under_layout(pool, made, one, tmp_path) < CHANGE_GAP


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model):
    """Return the state of a partly trained actor after one step, and its settings."""
    folder = tmp_path_factory.mktemp("saved")
    actor = only_rank(model("qwen2-deep"), trainable=TOP)
    rollouts = lab.make_rollouts()
    actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    written = actor.save(folder, in_background=False).finish()
    assert sorted(written) == sorted(path.name for path in folder.iterdir())
    assert "frozen.json" in written
    return folder, actor.settings


@pytest.mark.parametrize(
    "trainable", [Trainable(), Trainable(2), Trainable(1, ("*.mlp.*",))], ids=["all", "two layers", "a pattern"]
)
def test_state_with_other_trained_parameters_is_refused_by_key(saved, trainable):
    folder, made = saved
    other = replace(made, trainable=trainable)
    with pytest.raises(
        StorageError, match=r"saved with `train = {top_layers = 1}` and `freeze = \[\]`, but"
    ) as refused:
        lab.unstarted(other).load(folder)
    assert "`train` and `freeze`" in str(refused.value.hint)


def test_state_whose_model_has_other_frozen_weights_is_refused(saved, model, tmp_path):
    folder, made = saved
    moved = replace(made, model=str(lab.with_scaled_weights(model("qwen2-deep"), tmp_path / "scaled")))
    with pytest.raises(StorageError, match=r"frozen weights of the actor in .*scaled` are not those of the state"):
        lab.unstarted(moved).load(folder)


def test_frozen_file_is_damaged_or_missing(saved, tmp_path):
    folder, made = saved
    copied = tmp_path / "state"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    actor = lab.unstarted(made)
    (copied / "frozen.json").write_text(json.dumps({"model": "x"}), "utf-8")
    with pytest.raises(StorageError, match="cannot be read"):
        actor.load(copied)
    (copied / "frozen.json").unlink()
    with pytest.raises(StorageError, match="are not those of the state"):
        actor.load(copied)
