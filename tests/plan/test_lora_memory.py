"""Plans of adapters and of optimizers on the host, computed by hand. tests/engines/megatron compares the bytes with
real engines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plan.small_model import SMALL
from ppoctl.cli.app import run
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.cost import forward_flops
from ppoctl.models.lora import Lora
from ppoctl.models.model import Model
from ppoctl.models.shape import ExpertShape, ModelShape
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable
from ppoctl.plan.flops import full_row_work, work_of
from ppoctl.plan.memory.activations import forward_bytes, saved
from ppoctl.plan.memory.driver import batch_of
from ppoctl.plan.memory.estimate import Memory, estimate_here, training_of
from ppoctl.plan.memory.parameter_memory import Parameters, held_parameters, rank_parameters
from ppoctl.plan.memory.pipeline import stages_of, whole_model
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision
from ppoctl.plan.memory.trainer_memory import Training, ranks_of, state_bytes
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

MODELS = Path(__file__).parents[2] / "recipes/models"
LLAMA = MODELS / "meta-llama--Llama-3.2-1B"
ALONE, HALVES = ParallelTable(), ParallelTable(tensor=2)
ADAPTERS = Trainable(lora=Lora(rank=3, alpha=6.0))
SOME = Trainable(lora=Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj")))
SPLIT_A, SPLIT_B = 3 * 16 + 3 * 20, 3 * (16 + 8 + 8 + 20 + 20)
"""Elements of a layer that tensor ranks split: A of o_proj and down_proj, B of the five other projections."""
WHOLE_A, WHOLE_B = 5 * 3 * 8, 2 * 3 * 8
LAYER = SPLIT_A + SPLIT_B + WHOLE_A + WHOLE_B
BASE = 2 * (2 * 128 + 2 * 64 + 3 * 160 + 2 * 8) + 8 + 2 * 128 * 8
"""All weights: 2 layers, final norm, embedding and output layer of 128 rows."""
BATCH = MicrobatchShape(tokens=10, read=6, logits_chunk=4, longest=5)


def test_tensor_ranks_split_one_matrix_of_each_adapter() -> None:
    alone = whole_model(SMALL)
    assert rank_parameters(Model(SMALL, "token", ADAPTERS), alone, ALONE) == Parameters(2 * LAYER, 0)
    assert (
        rank_parameters(Model(SMALL, "value", ADAPTERS), alone, ALONE).total == 2 * LAYER + 8
    )  # the head trains whole
    half = 2 * ((SPLIT_A + SPLIT_B) // 2 + WHOLE_A + WHOLE_B)
    assert rank_parameters(Model(SMALL, "token", ADAPTERS), alone, HALVES).total == half
    first, _ = stages_of(SMALL, ParallelTable(pipeline=2))
    assert rank_parameters(Model(SMALL, "token", ADAPTERS), first, ALONE).total == LAYER
    frozen = replace(ADAPTERS, freeze=("decoder.layers.0.*", "*.linear_qkv.weight"))
    of_output_and_mlp = SPLIT_A + 3 * (20 + 20) + 2 * 3 * 8 + WHOLE_B
    assert rank_parameters(Model(SMALL, "token", frozen), alone, ALONE).total == of_output_and_mlp
    assert held_parameters(Model(SMALL, "token", frozen), alone, ALONE).total == BASE + of_output_and_mlp


def test_frozen_weights_have_no_gradients_and_no_optimizer() -> None:
    layout = ParallelTable(data=2, distributed_optimizer=True)
    training = Training(
        Model(SMALL, "token", ADAPTERS, reference="shared"), layout, Precision(2, "gpu"), BATCH, BATCH, 3
    )
    [rank] = ranks_of(training)
    assert (rank.parameters, rank.trained_parameters) == (BASE + 2 * LAYER, 2 * LAYER)
    assert (rank.weights, rank.gradients) == (2 * (BASE + 2 * LAYER), 4 * 2 * LAYER)
    assert (rank.main_weights, rank.moments) == (4 * LAYER, 8 * LAYER)  # half of 2 LAYER on each data rank
    assert rank.merged == 4 * 8 * 20  # gate_proj in float32
    assert state_bytes(Model(SMALL, "token", ADAPTERS), layout, 2) == 14 * 2 * LAYER


def test_experts_of_a_mixture_have_weights_only() -> None:
    """Qwen1.5-MoE: hidden 2048, 60 experts of 1408 and a shared expert of 5632 in each of 24 layers, 16 heads of
    128. Adapters of rank r are on four square projections of attention and three of the shared expert."""
    shape = read_shape(MODELS / "Qwen--Qwen1.5-MoE-A2.7B-Chat")
    of_adapters = 24 * 32 * (4 * (2048 + 2048) + 3 * (2048 + 5632))
    experts = 24 * 60 * 3 * 2048 * 1408
    model = Model(shape, "token", Trainable(lora=Lora(rank=32, alpha=32.0)))
    assert rank_parameters(model, whole_model(shape), ALONE) == Parameters(of_adapters, 0)
    assert held_parameters(model, whole_model(shape), ALONE).experts == experts
    layout = ParallelTable(data=4, expert=4, distributed_optimizer=True)
    [rank] = ranks_of(Training(model, layout, Precision(2, "gpu"), BATCH, BATCH, 1))
    others = held_parameters(model, whole_model(shape), ALONE).shared
    assert rank.weights == 2 * (others + experts // 4)
    assert (rank.gradients, rank.main_weights, rank.moments) == (4 * of_adapters, of_adapters, 2 * of_adapters)
    assert rank.merged == 4 * 2048 * 5632
    assert state_bytes(model, layout, 2) == 14 * of_adapters


def test_reference_without_adapters_needs_no_memory() -> None:
    """Neither weights nor hidden states behind a trunk, also if the first layer has no adapters."""
    trainable = replace(ADAPTERS, freeze=("decoder.layers.0.*",))
    training = Training(Model(SMALL, "token", trainable), ALONE, Precision(4, "cpu"), BATCH, BATCH, 1)
    [without], [shared], [own] = (
        ranks_of(replace(training, model=replace(training.model, reference=kind)))
        for kind in (None, "adapters_off", "own")
    )
    assert shared == without
    assert own == replace(without, reference=4 * BASE)


def _shard(
    trainable: Trainable, layout: ParallelTable = ALONE, *, weight: int = 2, device: str = "cpu"
) -> ModelShard:
    precision = Precision(weight, device)
    return ModelShard(Model(SMALL, "token", trainable), layout, whole_model(SMALL), precision)


def test_adapters_keep_low_rank_rows_and_copies_of_a() -> None:
    kept = saved(_shard(ADAPTERS), BATCH)
    assert kept.adapters == 2 * 2 * (10 * 7 * 3 + SPLIT_A + WHOLE_A)
    assert saved(_shard(ADAPTERS, HALVES), BATCH).adapters == 2 * 2 * (10 * 7 * 3 + SPLIT_A // 2 + WHOLE_A)
    own_tokens = saved(_shard(ADAPTERS, ParallelTable(tensor=2, sequence=True)), BATCH).adapters
    assert own_tokens == 2 * 2 * (10 * 5 * 3 + 5 * 2 * 3 + SPLIT_A // 2 + WHOLE_A)
    recomputed = saved(replace(_shard(ADAPTERS), recompute="selective"), BATCH)
    assert recomputed.adapters == 2 * 2 * (10 * 4 * 3 + 3 * 16 + 3 * 3 * 8)
    assert recomputed.projections == kept.projections == 2 * 10 * 2 * 2 * 8
    # All projections have an adapter, so they keep their inputs. Norms keep one of two float32 copies.
    full = saved(_shard(Trainable()), BATCH)
    assert (kept.projections, kept.attention, kept.mlp) == (full.projections, full.attention, full.mlp)
    assert full.norms - kept.norms == 2 * 2 * 10 * 4 * 8
    assert full.ends - kept.ends == 10 * 4 * 8


def test_frozen_projections_gather_inputs_for_their_product_only() -> None:
    """The gathered input is 10 tokens x 8 numbers of float32. Training of all weights holds it between calls."""
    layout = ParallelTable(tensor=2, sequence=True)
    full = Training(Model(SMALL, "token"), layout, Precision(4, "cpu"), BATCH, BATCH, 1)
    [every], [some] = ranks_of(full), ranks_of(replace(full, model=replace(full.model, trainable=SOME)))
    assert (every.gather_buffer, some.gather_buffer) == (10 * 8 * 4, 0)
    assert some.forward == every.forward + 10 * 8 * 4


def test_frozen_projections_keep_no_input() -> None:
    """Only the input of attention is kept for gradients of weights if q_proj and v_proj have adapters."""
    full, some = saved(_shard(Trainable()), BATCH), saved(_shard(SOME), BATCH)
    assert (full.projections, some.projections) == (2 * 10 * 2 * 2 * 8, 2 * 10 * 2 * 8)
    assert full.attention - some.attention == 2 * 10 * 2 * 16
    assert (full.mlp, some.mlp) == (2 * 10 * 5 * 2 * 20, 2 * 10 * 4 * 2 * 20)
    selective = saved(replace(_shard(SOME), recompute="selective"), BATCH)
    assert selective.projections == full.projections  # an MLP is recomputed from its input
    # The kernels of a GPU keep the inputs of norms and the output of attention for gradients of their inputs.
    full, some = (saved(_shard(trainable, device="gpu"), BATCH) for trainable in (Trainable(), SOME))
    assert (full.norms, full.attention) == (some.norms, some.attention)


def test_pass_with_adapters_has_three_copies_of_an_output() -> None:
    """Next to 4 hidden states, and cosine and sine of 4 channels: 3 x (gate and up), which is more than the 5 numbers
    per channel of an MLP without adapters."""
    assert forward_bytes(_shard(ADAPTERS, weight=4), BATCH) == 10 * 4 * (4 * 8 + 4 + 3 * 2 * 20)


def test_pass_through_a_wide_shared_expert_has_the_copies_of_an_mlp() -> None:
    """It is wider than the routed experts of a token. Each layer with experts keeps the routing of its last tokens: a
    bool and a number for each of 2 experts, and an index for the chosen one."""
    experts = ExpertShape(2, 1, 4, renormalise=False, layers=(True, True), shared_ffn_hidden_size=20)
    mixture, routing = replace(SMALL, family="qwen2_moe", experts=experts), 10 * 2 * (2 * (1 + 4) + 8)
    for trainable, numbers in ((ADAPTERS, 3 * 2 * 20), (Trainable(), 5 * 20)):
        shard = replace(_shard(trainable, weight=4), model=Model(mixture, "token", trainable))
        assert forward_bytes(shard, BATCH) == 10 * 4 * (4 * 8 + 4 + numbers) + routing


@pytest.mark.parametrize(("weight", "held", "moved"), [(2, 12, 6), (4, 8, 12)])
def test_optimizer_on_host(weight: int, held: int, moved: int) -> None:
    layout = ParallelTable(data=2, distributed_optimizer=True)
    training = Training(Model(SMALL, "token"), layout, Precision(weight, "gpu"), BATCH, BATCH, 1)
    [device], [host] = ranks_of(training), ranks_of(replace(training, optimizer_on="cpu"))
    own = BASE // 2
    assert (device.host_optimizer, device.host_staging, device.moved) == (0, 0, 0)
    assert (host.host_optimizer, host.moved) == (held * own, moved * own)
    assert host.host_staging == 2 * 8 * own  # two gradients and two weights of float32
    assert device.resident - host.resident == held * own
    assert host.resident == weight * BASE + 4 * BASE
    assert (device.main_weights, device.moments) == (host.main_weights, host.moments)


def test_staging_of_large_model_is_bounded() -> None:
    shape = read_shape(LLAMA)
    [host] = ranks_of(
        Training(Model(shape, "token"), ALONE, Precision(2, "gpu"), BATCH, BATCH, 1, optimizer_on="cpu")
    )
    assert host.host_staging == 128 * 2**20
    assert host.moved == 6 * host.parameters


def _recipe(file: Path, *sets: str) -> Recipe:
    return load([file], [f"model.path={LLAMA}", *sets], {}).recipe


def _memory(file: Path, *sets: str) -> Memory:
    memory = estimate_here(_recipe(file, *sets), 80.0)
    assert memory is not None
    return memory


def _host(memory: Memory) -> dict[str, int]:
    assert memory.node is not None
    return {item.name: item.bytes for item in memory.node.items if item.role == "actor"}


def test_host_memory_of_node_has_optimizer(smallest: Path) -> None:
    sets = ("model.dtype=bfloat16", "cluster.offload=['actor', 'critic', 'generator']")
    device, host = (_memory(smallest, *sets, f"actor.optimizer.on={place}") for place in ("device", "cpu"))
    rank = host.roles["actor"].largest
    optimizer = 12 * rank.parameters
    on_device = [{item.name for item in memory.places[0].items} for memory in (device, host)]
    assert on_device[0] - on_device[1] == {"actor optimizer"}
    before, after = _host(device), _host(host)
    assert (after["actor optimizer"], after["staging of optimizers"]) == (optimizer, 2**27)
    assert {"actor optimizer", "staging of optimizers"}.isdisjoint(before)
    assert after["states being written"] == before["states being written"]  # the copy of an asynchronous save


def test_offloaded_bytes_are_weights_alone(smallest: Path) -> None:
    """Gradients are dropped, and the optimizer is on the host."""
    sets = ("model.dtype=bfloat16", "cluster.offload=['actor', 'critic', 'generator']", "actor.optimizer.on=cpu")
    memory = _memory(smallest, *sets)
    assert memory.node is not None
    sizes = [item.bytes for item in memory.node.items if (item.name, item.role) == ("offloaded", "actor")]
    assert sum(sizes) == memory.roles["actor"].largest.weights


def test_merged_weight_is_on_the_device_while_weights_are_sent(smallest: Path) -> None:
    items = _memory(smallest, "actor.train={lora={rank=4}}").places[0].items
    [merged] = [item for item in items if item.name == "merged weight"]
    assert merged.bytes == 4 * 2048 * 8192
    assert merged.stages == ("rollout", "eval")
    assert all(item.name != "merged weight" for item in _memory(smallest).places[0].items)


def test_recipe_reaches_estimate_of_adapters(smallest: Path) -> None:
    sets = ("actor.train={lora={rank=3, alpha=6, targets=['q_proj', 'v_proj']}}", "critic.optimizer.on=cpu")
    sets += ("ppo.kl={place='reward', coef=0.1}",)
    recipe = _recipe(smallest, *sets)
    actor, critic = (training_of(recipe, role, SMALL, Precision(4, "cpu")) for role in ("actor", "critic"))
    assert (actor.model, actor.optimizer_on) == (Model(SMALL, "token", SOME, reference="adapters_off"), "device")
    assert (critic.model, critic.optimizer_on) == (Model(SMALL, "value"), "cpu")


def test_flops_of_adapters(smallest: Path) -> None:
    """No weight has a gradient, which is a third of an update. Adapters add 6 FLOPs per element and token, and 2 to
    each pass of the actor, but none to the generator and to the reference."""
    shape = read_shape(LLAMA)
    batch = batch_of(_recipe(smallest))
    tokens = batch.prompt_tokens + batch.response_tokens
    lora = "actor.train={lora={rank=4, alpha=8}}"
    row = full_row_work(_recipe(smallest, lora), "actor", shape)
    adapters = 16 * 4 * (2 * (2048 + 2048) + 2 * (2048 + 512) + 3 * (2048 + 8192))
    weights = _matrices(shape)
    assert row.added == 2 * tokens * adapters
    assert row.update == pytest.approx(3 * row.forward - 2 * tokens * weights + 6 * tokens * adapters)

    def forwards(*sets: str) -> float:
        work = work_of(_recipe(smallest, *sets))
        assert work is not None
        return work.forwards

    kl = "ppo.kl={place='reward', coef=0.1, estimator='k1'}"
    of_reference = forwards(lora, kl) - forwards(lora, "ppo.kl={place='none'}")
    assert of_reference == pytest.approx(batch.sequences * row.forward)


def _matrices(shape: ModelShape) -> int:
    without_pairs = forward_flops(shape, 1, shape.vocab_size) - forward_flops(shape, 0, shape.vocab_size)
    return round((without_pairs - 4 * shape.num_layers * shape.query_channels) / 2)


def test_plan_prints_what_adapters_train(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("actor.train={lora={rank=1, targets=['k_proj']}}", "critic.train={lora={rank=16}}")
    words = [f"--set={each}" for each in (f"model.path={LLAMA}", "actor.optimizer.on=cpu", *sets)]
    assert run(["plan", str(smallest), *words]) == 0
    lines = [
        line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  trains")
    ]
    assert lines == [
        "actor 40,960 of 1.24 billion parameters: adapters of rank 1 on k_proj",
        "critic 11.3 million of 1.25 billion parameters: adapters of rank 16 on all projections, value head",
    ]


def test_plan_says_that_routed_experts_have_no_adapters(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("actor.train={lora={rank=32}}", "critic.train={lora={targets=['up_proj', 'v_proj']}}")
    words = [f"--set={each}" for each in (f"model.path={MODELS / 'Qwen--Qwen1.5-MoE-A2.7B-Chat'}", *sets)]
    run(["plan", str(smallest), *words])
    found = [line.partition(": adapters ")[2] for line in capsys.readouterr().out.splitlines() if "adapters" in line]
    assert found == [
        "of rank 32 on all projections (not of routed experts)",
        "of rank 8 on up_proj, v_proj (not of routed experts), value head",
    ]


def test_plan_shows_bytes_of_optimizer_on_host(smallest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--set={each}" for each in (f"model.path={LLAMA}", "model.dtype=bfloat16", "actor.optimizer.on=cpu")]
    assert run(["plan", str(smallest), *words]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  optimizer")]
    held, moved = (number * 1.2358 * 1e9 / 2**30 for number in (12, 6))
    sizes = f"{held + 0.125:.1f} GiB of host memory, {moved:.2f} GiB moved per step"
    assert line == f"  optimizer    actor on the CPU: {sizes}, in each process"
    assert run(["plan", str(smallest), "--json", *words]) == 0
    [rank] = json.loads(capsys.readouterr().out)["memory"]["roles"]["actor"]["ranks"]
    assert rank["moved"] == 6 * rank["parameters"]
