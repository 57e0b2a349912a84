"""A step on many GPUs, worked by hand with round costs."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppoctl.recipe import simulate as simulate_module
from ppoctl.recipe.load import load
from ppoctl.recipe.memory.decoder import Decoder
from ppoctl.recipe.memory.driver import records_of
from ppoctl.recipe.memory.estimate import batch_of
from ppoctl.recipe.memory.stages import rank_parameters, whole_model
from ppoctl.recipe.memory.trainer import state_bytes
from ppoctl.recipe.schema import ParallelTable, Recipe
from ppoctl.recipe.simulate import SimulatedStep, Units, World, calls, forward_flops, rollout_seconds, simulate

MODEL = Decoder(
    layers=3, hidden=8, inner=20, heads=4, kv_heads=2, head_dim=4, vocab=128, tied=False,
)  # fmt: skip
PRODUCTS = 3 * (2 * 128 + 2 * 64 + 3 * 160) + 128 * 8  # parameters that multiply
UNITS = Units(
    gpu_flops=1e6,
    gpu_utilisation=0.5,
    gpu_memory_bytes_s=1e6,
    decode_utilisation=0.5,
    gpu_nic_bytes_s=1e5,
    store_bytes_s=1e4,
    copy_bytes_s=1e5,
    balance_row_s=0.0,
    call_s=0.0,
)


@pytest.fixture
def recipe(smallest: Path) -> Recipe:
    """64 sequences of 20 + 13 tokens in 4 minibatches of 16, laid out for 16 GPUs."""
    sets = ["rollout.prompts_per_step=64", "ppo.minibatch_seqs=16", "checkpoint.every_steps=5"]
    return load([smallest], [*sets, "actor.parallel={tensor=2, data=8}", "critic.parallel={data=16}"], {}).recipe


def by_world(recipe: Recipe, **settings: bool) -> dict[int, SimulatedStep]:
    return {step.gpus: step for step in simulate(recipe, MODEL, units=UNITS, **settings)}


def test_a_forward_pass() -> None:
    """5 tokens see 15 pairs; a product and a sum each, over 16 channels of 3 layers for scores and for values."""
    assert forward_flops(MODEL, 5) == 2 * PRODUCTS * 5 + 2 * 2 * 3 * 16 * 15


def test_updates_wait_for_the_rank_with_most_rows(recipe: Recipe) -> None:
    """Three passes of 32 tokens; then float32 gradients go around, twice as an all-reduce does."""
    row = 3 * forward_flops(MODEL, 32) / 5e5
    found = by_world(recipe)
    assert found[8].data_ranks == 4
    for gpus, rows in ((8, 2), (64, 1), (1024, 1)):  # the critic: 16 rows on 8, 64 and 1,024 data ranks
        reduced = MODEL.parameters * 8 * (gpus - 1) / gpus / 1e5
        assert found[gpus].critic_update_s == pytest.approx(4 * (rows * row + reduced))
    halves = MODEL.parameters / 2 * 8 * 3 / 4 / 1e5  # the actor: tensor 2, four data ranks of four rows
    assert found[8].actor_update_s == pytest.approx(4 * (4 * row / 2 + halves))
    split = recipe.model_copy(update={"critic": recipe.critic.model_copy(update={"parallel": _distributed(recipe)})})
    gathered = MODEL.parameters * 6 * 7 / 8 / 1e5  # gradients once, bfloat16 weights once
    assert by_world(split)[8].critic_update_s == pytest.approx(4 * (2 * row + gathered))


def _distributed(recipe: Recipe) -> object:
    assert recipe.critic.parallel is not None
    return recipe.critic.parallel.model_copy(update={"distributed_optimizer": True})


def test_scoring(recipe: Recipe) -> None:
    """64 rows: 16 on each of the actor's four ranks of two GPUs, 8 on each of the critic's eight."""
    row = forward_flops(MODEL, 32) / 5e5
    assert by_world(recipe)[8].forward_s == pytest.approx(16 * row / 2 + 8 * row)


def test_context_ranks_exchange_keys_and_values(recipe: Recipe) -> None:
    """32 rows on each of two pairs, 2 tensor x 2 context; of half of a row's 32 tokens a rank receives, layer by
    layer, its half of 8 keys and 8 values in bfloat16."""
    layout = ParallelTable(tensor=2, context=2, data=4)
    split = recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"parallel": layout})})
    found = by_world(split)[8]
    assert found.data_ranks == 2
    row = forward_flops(MODEL, 32) / 5e5
    actor = 32 * (row / 4 + 16 * 3 * 8 * 2 / 1e5)
    assert found.forward_s == pytest.approx(actor + 8 * row)
    reduced = MODEL.parameters / 2 * 8 * 3 / 4 / 1e5  # over two data ranks of two
    assert found.actor_update_s == pytest.approx(4 * (3 * actor / 4 + reduced))


def world(recipe: Recipe, engines: int) -> World:
    alone = ParallelTable()
    return World(16, alone, alone, engines, batch_of(recipe), recipe.ppo.minibatch_seqs, weight=2)


def with_generator(recipe: Recipe, **keys: int) -> Recipe:
    return recipe.model_copy(update={"generator": recipe.generator.model_copy(update=keys)})


def test_engines_decode_in_waves(recipe: Recipe) -> None:
    """Keys and values of a token: 96 bytes; half a response is there on average."""
    weights = 2 * MODEL.parameters
    gpu_gib = (weights + 96 * 33 * 10) / 0.6 / 2**30 + 1e-9  # room for 10 sequences
    token = (weights + 10 * 26.5 * 96) / 5e5
    assert rollout_seconds(recipe, MODEL, world(recipe, 1), gpu_gib, UNITS)[0] == pytest.approx(7 * 13 * token)
    token = (weights + 4 * 26.5 * 96) / 5e5
    assert rollout_seconds(recipe, MODEL, world(recipe, 16), gpu_gib, UNITS)[0] == pytest.approx(13 * token)
    few = with_generator(recipe, max_concurrent_seqs=2)
    token = (weights + 2 * 26.5 * 96) / 5e5
    assert rollout_seconds(few, MODEL, world(recipe, 1), gpu_gib, UNITS)[0] == pytest.approx(32 * 13 * token)
    halves = rank_parameters(MODEL, "actor", whole_model(MODEL), ParallelTable(tensor=2)).total
    token = (2 * halves + 2 * 26.5 * 48) / 5e5  # each of two tensor ranks reads its half
    split = with_generator(few, tensor=2)
    assert rollout_seconds(split, MODEL, world(recipe, 1), gpu_gib, UNITS)[0] == pytest.approx(32 * 13 * token)


def test_the_driver_asks_every_process_of_an_engine_every_16_tokens(recipe: Recipe) -> None:
    """64 sequences of 13 tokens: 16 on each of four engines, in 8 waves of 2: 104 tokens, so 7 questions."""
    recipe, units = with_generator(recipe, max_concurrent_seqs=2, tensor=2), replace(UNITS, call_s=3.0)
    assert rollout_seconds(recipe, MODEL, world(recipe, 4), 1.0, units)[1] == 7 * 4 * 2 * 3.0
    assert (
        rollout_seconds(recipe, MODEL, world(recipe, 100), 1.0, units)[1] == 1 * 64 * 2 * 3.0
    )  # the others have none


def test_engines_fill_the_gpus_or_their_part_of_them(recipe: Recipe) -> None:
    assert {gpus: step.engines for gpus, step in by_world(recipe).items()} == {8: 8, 64: 64, 256: 256, 1024: 1024}
    assert by_world(with_generator(recipe, tensor=2))[64].engines == 32
    cluster = recipe.cluster.model_copy(update={"placement": "apart"})
    apart = with_generator(recipe, engines=16, tensor=2).model_copy(update={"cluster": cluster})
    found = by_world(apart)  # 16 GPUs for the actor, 16 for the critic, 32 for the generator
    assert (found[64].engines, found[64].data_ranks) == (16, 8)
    assert (found[8].engines, found[8].data_ranks) == (2, 1)
    # Three roles as large as one another leave some of 8 GPUs over: their own 48 are doubled instead.
    assert list(by_world(with_generator(apart, engines=8))) == [48, 192, 768]


def sending(recipe: Recipe, weights: str) -> Recipe:
    return recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"weights": weights})})


def test_weights_in_a_store_are_made_once_and_read_by_every_node(recipe: Recipe) -> None:
    found, size = by_world(sending(recipe, "store")), 2 * MODEL.parameters
    made = 1 / UNITS.checksum_bytes_s + 1 / UNITS.gpu_host_bytes_s + 1 / 1e5
    assert found[8].weights_s == pytest.approx(size * made)
    assert found[64].weights_s == pytest.approx(size * (7 / 1e4 + 1 / UNITS.gpu_host_bytes_s))
    assert (found[8].sent_weights_bytes, found[64].sent_weights_bytes) == (0, 7 * size)


def test_shared_weights_leave_no_node_that_has_a_copy_of_the_stage(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stages: each is on a third of the nodes, and the others get it from a store."""
    found, size = by_world(recipe), 2 * MODEL.parameters
    for gpus in (8, 64, 1024):
        assert found[gpus].weights_s == pytest.approx(
            size * (1 / UNITS.checksum_bytes_s + 2 / UNITS.gpu_memory_bytes_s)
        )
        assert found[gpus].sent_weights_bytes == 0
    monkeypatch.setattr(simulate_module, "WORLDS", (768,))
    stages = recipe.actor.model_copy(update={"parallel": ParallelTable(tensor=2, pipeline=3)})
    split = by_world(recipe.model_copy(update={"actor": stages}))[768]
    assert split.sent_weights_bytes == 64 * size
    assert split.weights_s == pytest.approx(size * (64 / 1e4 + 1 / UNITS.gpu_host_bytes_s))


@pytest.mark.parametrize(("weights", "asked"), [("shared", 8 * 2 + 64), ("store", 2 + 64), ("broadcast", 0)])
def test_the_driver_asks_for_each_bucket(recipe: Recipe, weights: str, asked: int) -> None:
    """Tensor ranks of each node (of one), and 64 engines; all weights are one bucket."""
    found = [simulate(sending(recipe, weights), MODEL, units=replace(UNITS, call_s=call))[1] for call in (0.0, 0.5)]
    assert found[1].weights_s - found[0].weights_s == pytest.approx(asked * 0.5)


def test_a_broadcast_of_weights_takes_as_long_on_any_number_of_gpus(recipe: Recipe) -> None:
    found, size = by_world(sending(recipe, "broadcast")), 2 * MODEL.parameters
    for gpus, sent in ((8, 0), (64, size), (1024, size)):
        assert found[gpus].weights_s == pytest.approx(size / UNITS.gpu_nic_bytes_s)
        assert found[gpus].sent_weights_bytes == sent


def test_saving_waits_for_copies_and_for_what_the_last_save_has_left(recipe: Recipe) -> None:
    """The actor's state in two parts, the critic's in one; five steps between saves."""
    actor, critic = (state_bytes(MODEL, role, ParallelTable(), 2) for role in ("actor", "critic"))
    copied = (actor / 2 + critic) / UNITS.gpu_host_bytes_s
    assert by_world(recipe)[64].save_s == pytest.approx(copied / 5)
    waits = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"asynchronous": False})})
    written = (actor / 2 + critic) / UNITS.digest_bytes_s + (actor + critic) / (8 * UNITS.disk_bytes_s)
    assert by_world(waits)[64].save_s == pytest.approx((copied + written) / 5)
    often = recipe.model_copy(update={"checkpoint": recipe.checkpoint.model_copy(update={"every_steps": 1})})
    slow = simulate(often, MODEL, units=replace(UNITS, disk_bytes_s=10.0))[0]
    left = critic / UNITS.digest_bytes_s + (actor + critic) / 10 - (slow.step_s - slow.save_s)
    assert left > 0
    assert slow.save_s == pytest.approx(copied + left)
    split = recipe.model_copy(update={"critic": recipe.critic.model_copy(update={"parallel": _distributed(recipe)})})
    gathered = critic / UNITS.gpu_nic_bytes_s
    assert by_world(split)[64].save_s == pytest.approx((copied + gathered) / 5)


def test_every_node_pulls_every_rollout_out_of_one(recipe: Recipe) -> None:
    """Four calls without a reference; five grids come back: values, log-probs and entropies, two updates."""
    batch, found = batch_of(recipe), by_world(recipe)
    rollouts = records_of(batch).rollout
    put = 4 * rollouts + 2 * 64 * 13 * 9
    assert [call.grids for call in calls(recipe, batch)] == [1, 2, 1, 1]
    assert found[8].object_bytes == found[1024].object_bytes == put
    assert (found[8].sent_bytes, found[64].sent_bytes, found[1024].sent_bytes) == (0, 7 * put, 127 * put)
    back = 5 * 4 * 64 * 13
    assert found[8].data_s == pytest.approx(put * 2 / 1e5 + back * 2 / 1e5)
    assert found[64].data_s == pytest.approx(put * (2 / 1e5 + 7 / 1e4) + back * (2 / 1e5 + 1 / 1e4))


def test_a_step_is_the_sum_of_its_costs(recipe: Recipe) -> None:
    for step in by_world(recipe).values():
        assert step.step_s == pytest.approx(sum(step.costs.values()))


def test_a_growing_step_has_as_much_per_gpu_as_the_recipes_layout(recipe: Recipe) -> None:
    found = by_world(recipe, growing=True)
    assert {gpus: step.sequences for gpus, step in found.items()} == {8: 32, 64: 256, 256: 1024, 1024: 4096}
    assert found[256].forward_s == pytest.approx(found[64].forward_s)
    assert found[256].sent_bytes == pytest.approx(found[64].sent_bytes * 4 * 31 / 7, rel=1e-3)


def test_a_world_that_holds_no_copy_is_left_out(recipe: Recipe) -> None:
    parallel = recipe.actor.parallel
    assert parallel is not None
    wide = recipe.actor.model_copy(update={"parallel": parallel.model_copy(update={"tensor": 16})})
    assert list(by_world(recipe.model_copy(update={"actor": wide}))) == [64, 256, 1024]


def test_every_cost_slows_the_step_it_is_a_part_of(recipe: Recipe) -> None:
    """A unit that nothing reads would be a number without meaning."""
    every = recipe.checkpoint.model_copy(update={"every_steps": 1, "asynchronous": False})
    rows = recipe.model_copy(update={"checkpoint": every})
    units = Units(call_s=1e-9)  # so that the engines are what a rollout waits for
    before = sum(step.step_s for step in simulate(rows, MODEL, units=units))
    for name, value, means in units.described():
        dearer = value * 2 if name.endswith("_s") and "bytes/s" not in means else value / 2
        found = simulate(rows, MODEL, units=replace(units, **{name: dearer}))
        assert sum(step.step_s for step in found) > before, name
