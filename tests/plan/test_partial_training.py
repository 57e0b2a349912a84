"""Plans of partly trained models, of a reference that shares the trunk, and of a value head on the actor, computed by
hand. tests/engines/megatron compares the bytes with real engines."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plan.small_model import SMALL as DENSE
from ppoctl.cli.app import run
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.convert.tensors import parameter_names
from ppoctl.models.cost import count_parameters, forward_flops
from ppoctl.models.head import SharedValueHead
from ppoctl.models.model import Model
from ppoctl.models.shape import ExpertShape
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import EVERYTHING, Trainable
from ppoctl.models.trainable_tables import ValueHeadTable
from ppoctl.plan.flops import full_row_work, work_of
from ppoctl.plan.memory.activations import forward_bytes, saved
from ppoctl.plan.memory.driver import batch_of, update_input_bytes
from ppoctl.plan.memory.estimate import estimate_here, training_of
from ppoctl.plan.memory.parameter_memory import Parameters, rank_parameters, trunk_end
from ppoctl.plan.memory.pipeline import stages_of, whole_model
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision
from ppoctl.plan.memory.trainer_memory import Training, ranks_of, state_bytes
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

MODELS = Path(__file__).parents[2] / "recipes/models"
SMALL = replace(DENSE, family="qwen2", num_layers=4, qkv_bias=True)
LAYER = 2 * 128 + 2 * 64 + 32 + 3 * 160 + 2 * 8
TABLE = 128 * 8  # 100 rows, padded to 128
TIED = replace(SMALL, tied_embeddings=True)
MIXED = replace(
    DENSE,
    family="qwen2_moe",
    qkv_bias=True,
    experts=ExpertShape(6, 2, 5, renormalise=False, layers=(False, True), shared_ffn_hidden_size=7, shared_gate=True),
)
ALONE = ParallelTable()
TOP = Trainable(top_layers=2)
ROUTERS = Trainable(freeze=("decoder.layers.*.mlp.router.weight",))
BATCH = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)


def with_model(training: Training, **changes: Any) -> Training:
    """Return the inputs of an estimate for a model that is described otherwise."""
    return replace(training, model=replace(training.model, **changes))


def test_parameters_that_train_of_each_rank() -> None:
    alone = whole_model(SMALL)
    assert rank_parameters(Model(SMALL, "token", TOP), alone, ALONE).total == 2 * LAYER + 8 + TABLE
    assert (
        rank_parameters(Model(TIED, "token", TOP), alone, ALONE).total == 2 * LAYER + 8
    )  # tied: frozen with the embedding
    assert rank_parameters(Model(SMALL, "value", TOP), alone, ALONE).total == 2 * LAYER + 8 + 8
    first, last = stages_of(TIED, ParallelTable(pipeline=2, first_stage_layers=3))
    assert rank_parameters(Model(TIED, "token", TOP), first, ALONE).total == LAYER
    assert rank_parameters(Model(TIED, "token", TOP), last, ALONE).total == LAYER + 8  # not the copy of the embedding
    halves = ParallelTable(tensor=2)
    biases = Trainable(freeze=("*.bias", "embedding.*"))
    split = (LAYER - 16 - 32) // 2 + 16
    assert rank_parameters(Model(SMALL, "token", biases), alone, halves).total == 4 * split + 8 + TABLE // 2
    assert (
        rank_parameters(Model(SMALL, "token", EVERYTHING), alone, ALONE).total == count_parameters(SMALL) + 2 * 28 * 8
    )


def test_experts_that_train() -> None:
    """6 experts of 3 x 8 x 5 in the second of two layers; a pattern that matches two of them freezes two thirds of
    their parameters each."""
    whole, both = whole_model(MIXED), {"layout": ParallelTable(data=2, expert=2)}
    every = rank_parameters(Model(MIXED, "token"), whole, **both)
    assert every.experts == 3 * 120
    assert rank_parameters(Model(MIXED, "token", ROUTERS), whole, **both) == Parameters(every.shared - 48, 360)
    some = Trainable(freeze=("*.local_experts.[03].linear_fc1.weight",))
    assert rank_parameters(Model(MIXED, "token", some), whole, **both).experts == 3 * 120 - 80
    assert rank_parameters(Model(MIXED, "token", Trainable(top_layers=1)), whole, **both).experts == 360


@pytest.mark.parametrize(
    ("trainable", "layers"),
    [
        (EVERYTHING, 0),
        (TOP, 2),
        (Trainable(top_layers=4), 0),
        (ROUTERS, 0),
        (Trainable(freeze=("embedding.*", "decoder.layers.[0-2].*")), 3),
        (Trainable(freeze=("embedding.*", "decoder.layers.0.mlp.*")), 0),
        (Trainable(freeze=("decoder.layers.[0-2].*",)), 0),  # the embedding trains
        (Trainable(freeze=("embedding.*", "decoder.layers.*")), 4),
        (Trainable(top_layers=3, freeze=("decoder.layers.1.*", "decoder.layers.2.[!i]*")), 2),
    ],
)
def test_layers_of_frozen_trunk(trainable: Trainable, layers: int) -> None:
    model = Model(SMALL, "token", trainable)
    assert trunk_end(model) == layers
    assert trunk_end(model) == model.first_layer(parameter_names(SMALL, "token"))


def test_state_bytes_of_part_that_trains() -> None:
    layout = ParallelTable(data=2, distributed_optimizer=True)
    training = Training(Model(TIED, "token", TOP, reference="shared"), layout, Precision(2, "cpu"), BATCH, BATCH, 3)
    [rank] = ranks_of(training)
    every, trained = 4 * LAYER + 8 + TABLE, 2 * LAYER + 8
    assert (rank.parameters, rank.trained_parameters) == (every, trained)
    assert (rank.weights, rank.gradients, rank.reference) == (2 * every, 4 * trained, 2 * trained)
    assert (rank.main_weights, rank.moments) == (2 * trained, 4 * trained)  # halves of 4 and 8
    [own] = ranks_of(with_model(training, reference="own"))
    assert own.reference == 2 * every
    assert state_bytes(Model(TIED, "token", TOP), layout, 2) == 14 * trained


def test_trunk_keeps_no_activations() -> None:
    """4 layers, of which 2 train: they keep what a model of two layers keeps, without ids of the embedding."""
    full = Training(Model(SMALL, "token"), ALONE, Precision(4, "cpu"), BATCH, BATCH, 1)
    [every], [top] = ranks_of(full), ranks_of(with_model(full, trainable=TOP))
    assert top.kept.mlp == every.kept.mlp // 2
    assert top.kept.norms == every.kept.norms // 2
    assert top.kept.ends == every.kept.ends - 8 * 10
    assert top.forward == every.forward
    [head] = ranks_of(with_model(full, trainable=Trainable(freeze=("embedding.*", "decoder.layers.*"))))
    assert head.kept.mlp + head.kept.attention + head.kept.norms + head.kept.projections == 0
    assert head.kept.logits == every.kept.logits
    # With one position to read, the pass through the trunk is the peak of the update.
    long = replace(BATCH, tokens=40, read=1)
    [head] = ranks_of(
        replace(with_model(full, trainable=Trainable(freeze=("embedding.*", "decoder.layers.*"))), microbatch=long)
    )
    shard = ModelShard(Model(SMALL, "token"), ALONE, replace(whole_model(SMALL), is_last=False), Precision(4, "cpu"))
    assert head.update == forward_bytes(shard, long)


def test_pipeline_rank_below_trunk_end_keeps_only_tables() -> None:
    layout = ParallelTable(pipeline=2)
    full = Training(Model(SMALL, "token", reference="shared"), layout, Precision(4, "cpu"), BATCH, BATCH, 5)
    first, last = ranks_of(with_model(full, trainable=Trainable(top_layers=1)))
    assert (first.trained_parameters, first.gradients, first.moments, first.reference) == (0, 0, 0, 0)
    tables = 10 * 4 * 4  # cosine and sine, which the input of a microbatch holds
    assert (first.kept.total, first.kept_under_way) == (tables, 2 * tables)
    one, whole = saved(_last(1), BATCH), saved(_last(2), BATCH)
    assert (last.kept, one.mlp) == (one, whole.mlp // 2)
    # The rank with the first trained layer stores hidden states of a microbatch for each rank.
    assert last.forward - ranks_of(full)[1].forward == 2 * 10 * 8 * 4
    assert first.forward == ranks_of(full)[0].forward


def _last(layers: int) -> ModelShard:
    layout = ParallelTable(pipeline=2)
    stage = replace(stages_of(SMALL, layout)[1], layers=(2, 3)[-layers:])
    return ModelShard(Model(SMALL, "token"), layout, stage, Precision(4, "cpu"))


@pytest.mark.parametrize(
    ("head", "numbers", "read"),
    [
        (SharedValueHead("linear"), 8, 0),  # it reads the numbers that the output layer keeps
        (SharedValueHead("mlp"), 2 * 8 * 8 + 2 * 8 + 2 * 8 + 1, 4 * 16),
        (SharedValueHead("linear", layers_copied=1), 8 + LAYER + 8, 4 * 8),
        (SharedValueHead("mlp", layers_copied=2), 2 * 8 * 8 + 2 * 8 + 2 * 8 + 1 + 2 * LAYER + 8, 4 * 8 + 4 * 16),
    ],
)
def test_value_head_on_actor(head: SharedValueHead, numbers: int, read: int) -> None:
    plain = Training(Model(SMALL, "token", reference="shared"), ALONE, Precision(4, "cpu"), BATCH, BATCH, 1)
    [without], [has] = ranks_of(plain), ranks_of(with_model(plain, value_head=head))
    assert has.parameters - without.parameters == numbers
    assert (has.gradients - without.gradients, has.moments - without.moments) == (4 * numbers, 8 * numbers)
    assert has.reference == without.reference  # the reference has no value head
    copied = head.layers_copied
    assert has.kept.mlp * 4 == without.kept.mlp * (4 + copied)
    norm = 10 * (2 * 4 * 8 + 4) if copied else 0
    assert has.kept.ends == without.kept.ends + norm + 6 * read
    # With a frozen trunk above the first copied layer, the copies still train and keep their activations.
    [frozen] = ranks_of(with_model(plain, value_head=head, trainable=Trainable(top_layers=1)))
    assert frozen.kept.mlp * 4 == without.kept.mlp * (1 + copied)
    state = state_bytes(Model(SMALL, "token", Trainable(top_layers=1), head), ALONE, 4)
    assert state == 12 * (LAYER + 8 + TABLE + numbers)


def _recipe(file: Path, *sets: str, model: str = "meta-llama--Llama-3.2-1B") -> Recipe:
    return load([file], [f"model.path={MODELS / model}", *sets], {}).recipe


def test_flops_of_partly_trained_model(smallest: Path) -> None:
    """The trunk of 14 layers has no backward pass. Without a gradient of its weights, the tied output layer costs 4
    instead of 6 FLOPs per weight and token. A frozen matrix above the trunk saves 2 as well."""
    shape = read_shape(MODELS / "meta-llama--Llama-3.2-1B")
    recipe = _recipe(smallest)
    batch = batch_of(recipe)
    tokens = batch.prompt_tokens + batch.response_tokens
    head = 2.0 * tokens * shape.vocab_size * shape.hidden_size
    full = full_row_work(recipe, "actor", shape)
    assert full.update == 3 * full.forward == 3 * forward_flops(shape, tokens, shape.vocab_size)
    top = full_row_work(_recipe(smallest, "actor.train={top_layers=2}"), "actor", shape)
    layers = full.forward - head
    assert top.forward == full.forward
    assert top.top == pytest.approx(head + 2 / 16 * layers)
    assert top.update == pytest.approx(full.forward + 2 * head + 2 * 2 / 16 * layers - head)
    mlp = full_row_work(_recipe(smallest, "actor.freeze=decoder.layers.*.mlp.*"), "actor", shape)
    weights = 3 * shape.hidden_size * shape.ffn_hidden_size * 16
    assert full.update - mlp.update == pytest.approx(2 * tokens * weights)


def test_pass_of_the_reference_begins_after_a_shared_trunk(smallest: Path) -> None:
    """Log-probs of the reference take the top alone. The full KL takes all layers."""
    top = "actor.train={top_layers=2}"
    row = full_row_work(_recipe(smallest, top), "actor", read_shape(MODELS / "meta-llama--Llama-3.2-1B"))

    def forwards(kl: str) -> float:
        work = work_of(_recipe(smallest, top, f"ppo.kl={kl}"))
        assert work is not None
        return work.forwards

    without = forwards("{place='none'}")
    logprobs, full = (
        forwards(f"{{place='reward', coef=0.1, estimator='{name}'}}") - without for name in ("k1", "full")
    )
    assert logprobs / full == pytest.approx(row.top / row.forward)
    assert full > 0


def test_flops_of_experts_that_do_not_train(smallest: Path) -> None:
    """A token is multiplied with 4 of 60 experts."""
    model = "Qwen--Qwen1.5-MoE-A2.7B-Chat"
    shape = read_shape(MODELS / model)
    full, frozen = (
        full_row_work(_recipe(smallest, *sets, model=model), "actor", shape)
        for sets in ((), ("actor.freeze=decoder.layers.*.local_experts.*",))
    )
    batch = batch_of(_recipe(smallest))
    weights = 24 * 4 * 3 * 2048 * 1408
    assert full.update - frozen.update == pytest.approx(2 * (batch.prompt_tokens + batch.response_tokens) * weights)


def test_recipe_reaches_estimate(smallest: Path) -> None:
    at = Precision(4, "cpu")
    sets = [
        "actor.train={top_layers=2}",
        "critic.freeze=['*.bias', 'embedding.*']",
        "ppo.kl={place='reward', coef=0.1}",
    ]
    recipe = load([smallest], sets, {}).recipe
    actor, critic = (training_of(recipe, role, SMALL, at) for role in ("actor", "critic"))
    assert actor.model == Model(SMALL, "token", TOP, reference="shared")
    assert critic.model == Model(SMALL, "value", Trainable(freeze=("*.bias", "embedding.*")))
    own = load([smallest], [*sets, "model.reference=org/other"], {}).recipe
    assert training_of(own, "actor", SMALL, at).model.reference == "own"


def test_recipe_with_value_head_has_one_role(smallest: Path) -> None:
    both = _recipe(smallest)
    head = ValueHeadTable(on="actor", head="mlp", layers_copied=1)
    recipe = both.model_copy(update={"critic": head})
    assert training_of(recipe, "actor", SMALL, Precision(4, "cpu")).model.value_head == SharedValueHead("mlp", 1)
    grids = [update_input_bytes(batch_of(each), "token") for each in (both, recipe)]
    assert grids[1] - grids[0] == 8 * batch_of(recipe).cells  # old values and returns


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        ((), ""),
        (("actor.train={top_layers=2}",), "2 of 16 layers, final norm; the tied output layer is frozen"),
        (("actor.freeze=decoder.layers.*.mlp.*",), "`decoder.layers.*.mlp.*` is frozen"),
        (
            ("actor.train={top_layers=1}", "actor.freeze=['*.linear_fc1.*', '*norm*']"),
            "1 of 16 layers, final norm; the tied output layer is frozen, `*.linear_fc1.*`, `*norm*` are frozen",
        ),
    ],
)
def test_plan_says_what_trains(
    smallest: Path, capsys: pytest.CaptureFixture[str], sets: tuple[str, ...], text: str
) -> None:
    words = [f"--set={each}" for each in (f"model.path={MODELS / 'meta-llama--Llama-3.2-1B'}", *sets)]
    assert run(["plan", str(smallest), *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  trains ")]
    assert len(lines) == bool(text)
    assert all(line.endswith(text) for line in lines)
    if text.startswith("2 of"):
        assert "actor 0.122 of 1.24 billion parameters: 2" in lines[0]
        assert run(["plan", str(smallest), "--json", *words]) == 0
        role = json.loads(capsys.readouterr().out)["roles"]["actor"]
        assert role["trained_parameters"] == 2 * 60821504 + 2048


def test_last_layers_of_actor_lower_memory_of_its_update(smallest: Path) -> None:
    full, top = (estimate_here(_recipe(smallest, *sets), 80.0) for sets in ((), ("actor.train={top_layers=2}",)))
    assert full is not None
    assert top is not None
    assert full.roles["actor"].state > 9 * top.roles["actor"].state
    update = [
        {stage.stage: stage.bytes for stage in memory.places[0].stages}["actor_update"] for memory in (full, top)
    ]
    assert update[0] - update[1] > 12 * 0.8 * count_parameters(read_shape(MODELS / "meta-llama--Llama-3.2-1B"))
