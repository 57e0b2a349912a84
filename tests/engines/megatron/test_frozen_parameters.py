"""Frozen parameters on real ranks: they keep their bits, have no gradient and no optimizer state, and the parameters
that train have the gradient of full training.

The grids of families and layouts are those of the neighbouring files.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import test_deepseek_layouts as deepseek
import test_expert_layouts as mixture
import test_family_layouts as families
import test_megatron_layouts as dense
import torch
from layout_lab import (
    CHANGE_GAP,
    GRADIENT_GAP,
    STEP,
    gap,
    policy_objective,
    resumes_under_layout,
    settings,
    three_steps,
    trainer,
)
from rank_pool import RankPool
from safetensors.torch import load_file
from torch import Tensor

from ppoctl.convert.frozen_base import read_frozen_base
from ppoctl.convert.torch_dist import read_metadata
from ppoctl.engines.megatron.optimizer import gradient_buffers, held_tensors
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.errors import StorageError
from ppoctl.model.trainable import Trainable
from ppoctl.recipe.schema import BySequences, ParallelTable

TOP = Trainable(top_layers=1)
NEVER = "e_score_correction_bias"
"""End of the name of a tensor that no training changes."""


def in_top(name: str, last: int) -> bool:
    """Whether a Hugging Face tensor trains with `top_layers = 1`, if `last` is the number of the last layer."""
    return name.startswith((f"model.layers.{last}.", "model.norm.", "lm_head.", "score.")) and NEVER not in name


def last_layer(kind: str) -> int:
    return int(lab.hugging_face_model(kind).config.num_hidden_layers) - 1


def unclipped(steps: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the first gradient as it was before clipping."""
    factor = max(1.0, float(steps["reported"]["0 grad_norm"]) / STEP.grad_clip)
    return {name: factor * gradient for name, gradient in steps["gradient"].items()}


def check_steps(
    found: dict[str, dict[str, Tensor]],
    whole: dict[str, dict[str, Tensor]],
    trains: Callable[[str], bool],
    *,
    is_sharded: bool = False,
) -> None:
    """Compare three steps of a part with three steps of all parameters: the first gradient, and what has moved. Under
    a distributed optimizer no rank has the complete gradient, so only its norm is compared."""
    names = {name for name in whole["change"] if trains(name)}
    assert 0 < len(names) < len(whole["change"])
    assert {name for name, change in found["change"].items() if change.any()} == names
    part, expected = (
        {name: gradient for name, gradient in unclipped(of).items() if name in names} for of in (found, whole)
    )
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    assert norm > 0.01
    assert abs(float(found["reported"]["0 grad_norm"]) / norm - 1) < GRADIENT_GAP
    torch.testing.assert_close(found["reported"]["0 primary"], whole["reported"]["0 primary"], atol=1e-4, rtol=1e-4)
    assert is_sharded or gap(part, expected) < GRADIENT_GAP


CASES = [
    *(("qwen2-deep", role, layout) for role in ("actor", "critic") for layout in dense.LAYOUTS.values()),
    *families.CASES,
    *(("qwen3-moe", role, layout) for role in ("actor", "critic") for layout in mixture.LAYOUTS.values()),
    *(("deepseek-v3-low-rank", "actor", layout) for layout in deepseek.LAYOUTS.values()),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "role", "layout"), CASES, ids=[f"{kind} {role} {layout.describe()}" for kind, role, layout in CASES]
)
def test_top_layer_alone_moves_with_the_gradient_of_full_training(pool, model, alone, kind, role, layout):
    found = three_steps(pool, replace(settings(model(kind), role, layout), trainable=TOP))
    whole, last = alone(kind, role), last_layer(kind)
    check_steps(found, whole, lambda name: in_top(name, last), is_sharded=layout.distributed_optimizer)


ROUTERS = ("decoder.layers.*.mlp.router.weight",)
EXPERTS_ALONE = ("embedding.*", "output_layer.*", "*norm*", "*attention*", "*router*")
LAST_MLP_ALONE = ("embedding.*", "decoder.layers.[0-2].*", "*attention*", "*norm*")
PATTERNS = {
    "weights of a product whose bias trains": (
        "qwen2-deep",
        ("*.linear_qkv.weight",),
        ParallelTable(tensor=2),
        lambda name: not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")),
    ),
    "a layer between others": (
        "qwen2-deep",
        ("decoder.layers.1.*",),
        ParallelTable(pipeline=2, stages_per_rank=2),
        lambda name: not name.startswith("model.layers.1."),
    ),
    "a tied embedding": (
        "gemma2",
        ("embedding.*",),
        ParallelTable(pipeline=2),
        lambda name: not name.startswith("model.embed_tokens."),
    ),
    "all but the last norm": (
        "qwen2-deep",
        ("embedding.*", "decoder.layers.*"),
        ParallelTable(pipeline=2),
        lambda name: name == "model.norm.weight",
    ),
    "routers": (
        "qwen3-moe",
        ROUTERS,
        ParallelTable(pipeline=2, data=2, expert=2, first_stage_layers=1),
        lambda name: not name.endswith(".mlp.gate.weight"),
    ),
    "routers with groups": (
        "deepseek-v3-low-rank",
        ROUTERS,
        ParallelTable(data=2, expert=2),
        lambda name: not name.endswith((".mlp.gate.weight", NEVER)),
    ),
    "all but the experts": (
        "qwen3-moe",
        EXPERTS_ALONE,
        ParallelTable(data=2, expert=2),
        lambda name: ".experts." in name,
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PATTERNS)
def test_parameters_of_a_pattern_stay_and_others_have_the_gradient_of_full_training(pool, model, alone, case):
    kind, freeze, layout, trains = PATTERNS[case]
    found = three_steps(pool, replace(settings(model(kind), "actor", layout), trainable=Trainable(None, freeze)))
    check_steps(found, alone(kind, "actor"), trains)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize(
    ("trainable", "layout"),
    [
        (TOP, ParallelTable()),
        (TOP, ParallelTable(pipeline=2)),
        (TOP, ParallelTable(tensor=2, sequence=True)),
        (Trainable(None, LAST_MLP_ALONE), ParallelTable()),
    ],
    ids=["top", "top PP2", "top TP2", "last MLP"],
)
def test_recomputed_layer_above_frozen_trunk_has_its_gradient(pool, model, alone, trainable, layout, recompute):
    """Megatron-Core recomputes a part of the model only if the input of the part needs a gradient."""
    whole, kind = alone("qwen2-deep", "actor"), "qwen2-deep"
    made = replace(settings(model(kind), "actor", layout), trainable=trainable, recompute=recompute)
    part = ".mlp." if trainable.freeze else "model."
    check_steps(three_steps(pool, made), whole, lambda name: in_top(name, 3) and part in name)


def only_rank(folder: Path, **settings: object) -> MegatronActor:
    made = TrainerSettings(
        "actor", str(folder), torch.float32, BySequences(microbatch_seqs=2, logits_chunk_tokens=5), **settings
    )
    actor = MegatronActor(made, ThisProcess(MegatronRank(made)))
    actor.start()
    return actor


@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("sharded", [False, True], ids=["usual", "distributed optimizer"])
def test_frozen_parameters_have_no_buffer_no_main_weights_and_no_moments(model, sharded):
    folder = model("qwen2-deep")
    actor = only_rank(folder, trainable=TOP, parallel=ParallelTable(distributed_optimizer=sharded))
    rollouts = lab.make_rollouts()
    actor.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    rank = lab.rank_of(actor)
    trained = sum(
        tensor.numel() for name, tensor in load_file(folder / "model.safetensors").items() if in_top(name, 3)
    )
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
        trainer(pool, replace(settings(model("qwen2-six"), "actor", layout), trainable=TOP)).start()
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


LAYOUTS = {"alone": ParallelTable(), "alone sharded": ParallelTable(distributed_optimizer=True), **dense.LAYOUTS}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "saved_under", "loaded_under"),
    [
        ("qwen2-deep", "PP2", "alone"),
        ("qwen2-deep", "TP2", "PP2 interleaved"),
        ("qwen2-deep", "DP2 PP2", "DP2 distributed optimizer"),
        ("qwen2-deep", "DP2 distributed optimizer", "DP2 PP2"),
        ("qwen2-deep", "DP2 PP2 interleaved", "alone sharded"),
        ("qwen3-moe", "PP2 EP2", "EP2 distributed optimizer"),
        ("qwen3-moe", "PP2", "EP2"),
    ],
)
def test_state_of_top_layer_loads_under_other_layout(pool, model, tmp_path, kind, saved_under, loaded_under, dtype):
    layouts = LAYOUTS if kind == "qwen2-deep" else {**LAYOUTS, **mixture.LAYOUTS}
    saved, loaded = (
        replace(settings(model(kind), "actor", layouts[layout], dtype), trainable=TOP)
        for layout in (saved_under, loaded_under)
    )
    bound = CHANGE_GAP if dtype is torch.float32 else 0.1 if kind == "qwen2-deep" else 0.2
    assert resumes_under_layout(pool, saved, loaded, tmp_path) < bound
    last = last_layer(kind)
    keys = [key for key in read_metadata(tmp_path).state_dict_metadata if "decoder.layers." in key]
    assert keys
    assert all(f"decoder.layers.{last}." in key for key in keys)
    assert not any("embedding" in key for key in read_metadata(tmp_path).state_dict_metadata)
    base = read_frozen_base(tmp_path)
    assert base is not None
    assert base.model == str(model(kind))


@pytest.mark.parametrize("kind", ["qwen2-deep", "qwen3-moe"])
def test_digest_of_frozen_weights_does_not_depend_on_layout(pool, model, tmp_path, kind):
    digests = []
    for number, layout in enumerate([ParallelTable(), ParallelTable(pipeline=2, tensor=2, sequence=True)]):
        layout = layout if kind == "qwen2-deep" or not number else mixture.LAYOUTS["PP2 EP2"]
        actor = trainer(pool, replace(settings(model(kind), "actor", layout), trainable=TOP))
        actor.start()
        folder = tmp_path / str(number)
        folder.mkdir()
        lab.save(actor, folder)
        base = read_frozen_base(folder)
        assert base is not None
        digests.append(base.digest)
    assert digests[0] == digests[1]


def test_dp_reshardable_state_of_empty_pipeline_rank_resumes(pool, model, tmp_path):
    layout = ParallelTable(data=2, pipeline=2, distributed_optimizer=True)
    made = replace(settings(model("qwen2-deep"), "actor", layout), trainable=TOP, reshardable="dp")
    one = replace(made, parallel=ParallelTable(pipeline=2, distributed_optimizer=True))
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
        MegatronActor(other, ThisProcess(MegatronRank(other))).load(folder)
    assert "`train` and `freeze`" in str(refused.value.hint)


def test_state_whose_model_has_other_frozen_weights_is_refused(saved, model, tmp_path):
    folder, made = saved
    moved = replace(made, model=str(lab.with_scaled_weights(model("qwen2-deep"), tmp_path / "scaled")))
    with pytest.raises(StorageError, match=r"frozen weights of the actor in .*scaled` are not those of the state"):
        MegatronActor(moved, ThisProcess(MegatronRank(moved))).load(folder)


def test_frozen_file_is_damaged_or_missing(saved, tmp_path):
    folder, made = saved
    copied = tmp_path / "state"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    actor = MegatronActor(made, ThisProcess(MegatronRank(made)))
    (copied / "frozen.json").write_text(json.dumps({"model": "x"}), "utf-8")
    with pytest.raises(StorageError, match="cannot be read"):
        actor.load(copied)
    (copied / "frozen.json").unlink()
    with pytest.raises(StorageError, match="are not those of the state"):
        actor.load(copied)


def test_lost_gradient_of_a_frozen_run_fails_the_comparison(pool: RankPool, model, alone):
    """Shows that the comparison can fail: the gradients of the trained layer's MLP are lost on one tensor rank."""
    trained = trainer(pool, replace(settings(model("qwen2-deep"), "actor", ParallelTable(tensor=2)), trainable=TOP))
    trained.start()
    pool.forget_gradient(1, only=".mlp.")
    rollouts = lab.make_rollouts()
    [result] = trained.update(rollouts, [lab.minibatch(rollouts, step=STEP)], policy_objective(rollouts))
    expected = unclipped(alone("qwen2-deep", "actor"))
    norm = math.sqrt(sum(float(expected[name].square().sum()) for name in expected if in_top(name, 3)))
    assert abs(result.grad_norm / norm - 1) > 1e-2
