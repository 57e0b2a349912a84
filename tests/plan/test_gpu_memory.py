"""Memory of processes on a GPU and a host in addition to their models, computed by hand: GPU memory of other
processes, saves, Ray's object store, lengths that do not fit, and the recipe for 64 GPUs line by line."""

import json
from collections import Counter
from math import isqrt
from pathlib import Path

import pytest

from ppoctl.models.shape_reader import read_shape
from ppoctl.plan.memory import driver
from ppoctl.plan.memory.estimate import Memory, estimate
from ppoctl.plan.memory.pools import Pool
from ppoctl.recipe.loading.load import load

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart" / "model"
DEEPSEEK_7B = ROOT / "recipes/models/deepseek-ai--DeepSeek-R1-Distill-Qwen-7B"
MIB, GIB = 2**20, 2**30


def _estimate(file: Path, *sets: str, model: Path = QUICKSTART, gpu_gib: float | None = 80.0) -> Memory:
    recipe = load([file], [f"model.path={model}", *sets], {"PPOCTL_DATA": "/data"}).recipe
    return estimate(recipe, dict.fromkeys(recipe.trained, read_shape(model)), gpu_gib)


def _lines(pool: Pool | None, stage: str) -> dict[str, int]:
    assert pool is not None
    return {item.name: item.bytes for item in pool.largest(stage)}


def test_gpu_estimate_includes_cuda_contexts_and_communicators(smallest: Path) -> None:
    [alone] = _estimate(smallest).places
    assert _lines(alone, "reward")["CUDA contexts"] == 2 * int(0.6 * GIB)  # of the trainers, and of vLLM in addition
    assert "NCCL" not in _lines(alone, "reward")
    everyone = "cluster.offload=['actor', 'critic', 'generator']"
    [shared] = _estimate(smallest, "actor.parallel={data=2}", "critic.parallel={data=1}", everyone).places
    for stage in ("values", "actor_save"):  # offloaded roles included
        assert _lines(shared, stage)["CUDA contexts"] == 3 * int(0.6 * GIB)
        assert _lines(shared, stage)["NCCL"] == 5 * GIB // 4
    [split] = _estimate(smallest, "generator.tensor=2", "actor.parallel={}", "critic.parallel={}").places
    assert _lines(split, "values")["NCCL"] == 5 * GIB // 4
    [on_cpus] = _estimate(smallest, "generator.tensor=2", gpu_gib=None).places
    assert {"CUDA contexts", "NCCL", "fragments", "staging"}.isdisjoint(_lines(on_cpus, "actor_save"))


def test_advice_for_separate_roles_does_not_suggest_separation(smallest: Path) -> None:
    advice = {}
    for placement in ("colocated", "apart"):
        sets = [f"cluster.placement={placement}", "actor.parallel={data=2}"]
        places = _estimate(smallest, *sets).places
        items = [item for place in places for item in place.items if item.name in ("CUDA contexts", "NCCL")]
        assert {item.name for item in items} == {"CUDA contexts", "NCCL"}
        [advice[placement]] = {item.lower for item in items}
    assert advice["colocated"] == 'set `cluster.placement = "apart"`'
    assert advice["apart"].startswith("nothing makes it smaller")


def test_fragments_are_a_tenth_of_saved_activations(smallest: Path) -> None:
    memory = _estimate(smallest)
    [gpu], actor, critic = memory.places, *(memory.roles[role].largest for role in ("actor", "critic"))
    assert _lines(gpu, "logprobs")["fragments"] == int(0.1 * actor.forward)
    assert _lines(gpu, "actor_update")["fragments"] == int(0.1 * actor.update)
    assert _lines(gpu, "critic_update")["fragments"] == int(0.1 * critic.update)
    assert "fragments" not in _lines(gpu, "reward")


def test_broadcast_communicators_stay_allocated_next_to_engine(smallest: Path) -> None:
    """Two pipeline ranks send: two communicators on an engine, one on a sender."""
    sets = ["actor.parallel={pipeline=2}", "cluster.placement=apart", "cluster.weights=broadcast"]
    communicators = {
        place.name: _lines(place, "reward").get("NCCL for weights") for place in _estimate(smallest, *sets).places
    }
    assert sorted(communicators.values(), key=str) == sorted([2 * GIB // 4, GIB // 4, None], key=str)


def test_cuda_graphs_stay_allocated_while_engine_sleeps(smallest: Path) -> None:
    sets = ["cluster.offload=['generator']", "generator.compile=true"]
    [gpu] = _estimate(smallest, *sets).places
    assert _lines(gpu, "values")["CUDA graphs"] == GIB
    [eager] = _estimate(smallest, *sets, "generator.compile=false").places
    assert "CUDA graphs" not in _lines(eager, "values")
    [on_a_cpu] = _estimate(smallest, *sets, gpu_gib=None).places
    assert "CUDA graphs" not in _lines(on_a_cpu, "values")


def test_checkpoint_save_host_memory(smallest: Path) -> None:
    """Two tensor and two context ranks with a distributed optimizer in float32. The first context rank gathers three
    float32 numbers of each parameter, and writes them and the weights; each rank owns half of them."""
    split = "actor.parallel={tensor=2, context=2, distributed_optimizer=true}"
    sets = ["model.dtype=float32", split, "critic.parallel={data=2}"]
    memory = _estimate(smallest, *sets)
    mine = 3 * 4 * memory.roles["actor"].largest.parameters
    before, during = (_lines(memory.node, stage) for stage in ("eval", "actor_save"))
    assert during["gathered for a save"] == 2 * mine + 4 * (mine // 2)
    assert during["staging"] == 4 * 128 * MIB
    assert "gathered for a save" not in before
    loading = _lines(memory.node, "actor_load")
    assert loading["read by a load"] == 4 * mine  # complete on every rank
    assert "states being written" not in loading
    assert "read by a load" not in _lines(memory.node, "critic_load")
    assert "gathered for a save" not in _lines(memory.node, "critic_save")  # no distributed optimizer
    states = {role: memory.roles[role].state for role in ("actor", "critic")}
    assert before["states being written"] == sum(states.values())
    assert states["actor"] == pytest.approx(2 * (mine + mine // 3), rel=0.01)  # norms are on both tensor ranks

    own = _estimate(smallest, *sets, "checkpoint.reshardable=dp")
    assert "gathered for a save" not in _lines(own.node, "actor_save")
    assert "read by a load" not in _lines(own.node, "actor_load")
    assert _lines(own.node, "eval")["states being written"] == pytest.approx(sum(states.values()), abs=8)
    waits = _estimate(smallest, *sets, "checkpoint.asynchronous=false")
    assert "states being written" not in _lines(waits.node, "eval")
    assert _lines(waits.node, "actor_save")["states being written"] == 2 * mine
    assert "staging" not in _lines(waits.node, "actor_save")
    [on_cpus] = _estimate(smallest, *sets, gpu_gib=None).places
    assert _lines(on_cpus, "actor_save")["gathered for a save"] == 2 * mine + 4 * (mine // 2)


def test_object_store_holds_two_largest_calls(smallest: Path) -> None:
    """100,000 prompts of 20 + 13 tokens: ids, two lengths, old log-probs, advantages and the mask."""
    sets = ["generator.engines=2", "rollout.prompts_per_step=100000", "ppo.minibatch_seqs=100"]
    recipe = load([smallest], sets, {}).recipe
    call = 100_000 * (33 * 4 + 2 * 8 + 13 * 9)
    floor = 256 * MIB
    assert driver.object_store_bytes(recipe, 2**40) == floor > 2 * call
    more = load([smallest], [*sets, "rollout.samples_per_prompt=10"], {}).recipe
    assert driver.object_store_bytes(more, 2**40) == 2 * 10 * call
    stored = load([smallest], [*sets, "rollout.samples_per_prompt=10", "cluster.weights=store"], {}).recipe
    assert driver.object_store_bytes(stored, 2**40) == 2 * 10 * call + 2 * 64 * MIB
    assert _lines(_estimate(smallest, *sets).node, "reward")["object store"] == floor
    for free, is_given in ((2 * 300 * MIB, 300 * MIB), (0, floor)):
        assert driver.object_store_bytes(more, free) == is_given


def test_missing_shared_memory_folder_has_zero_free_bytes(tmp_path: Path) -> None:
    assert driver.free_shared_memory(tmp_path / "none") == 0
    assert driver.free_shared_memory(tmp_path) > 0


def _gemma(folder: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512, "head_dim": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 20000}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 32}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma2", "eos_token_id": 1, **sizes, **heads, **caps})
    )
    return folder


def test_too_long_sequences_for_unfused_attention_are_named(smallest: Path, tmp_path: Path) -> None:
    """8,192 x 8,192 pairs of 16 heads: 4 + 2 + 2 bytes each, and a mask. Each of two tensor ranks has half, and the
    mask."""
    model = _gemma(tmp_path)
    sets = ["rollout.max_prompt_tokens=192", "rollout.max_new_tokens=8001", "critic.parallel={tensor=2}"]
    actor, critic = _estimate(smallest, *sets, model=model, gpu_gib=9.0).warnings
    most = isqrt(9 * GIB // (4 * (16 * 8 + 1)))
    assert (
        f"keeps {8192**2 * 129 / GIB:.3g} GiB of scores for a sequence of 8,192 tokens in each of 4 layers" in actor
    )
    assert f"a GPU has memory for {most:,} tokens" in actor
    assert '`actor.recompute = "full"`' in actor
    assert f"keeps {8192**2 * 65 / GIB:.3g} GiB" in critic
    full = [*sets, "actor.recompute=full"]
    assert _estimate(smallest, *full, model=model, gpu_gib=9.0).warnings == (critic,)
    assert "one layer at a time" not in _estimate(smallest, *full, model=model, gpu_gib=8.0).warnings[0]
    assert _estimate(smallest, *sets, model=model, gpu_gib=80.0).warnings == ()
    assert _estimate(smallest, *sets, gpu_gib=9.0).warnings == ()  # a different model


_ALWAYS = ("rollouts in ranks", "libraries", "object store", "samples and records")


def test_recipe_for_64_gpus_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """7,615,616,512 parameters; 4 and 2 tensor ranks have these shards of them, and all norms."""
    monkeypatch.setattr(driver, "free_shared_memory", lambda: 2**40)
    actor, critic = 1_904_057_344, 3_535_415_296
    file = ROOT / "recipes" / "dsr1-7b.toml"
    memory = _estimate(file, "generator.compile=true", model=DEEPSEEK_7B)
    [gpu], node = memory.places, memory.node
    assert [memory.roles[role].largest.parameters for role in ("actor", "critic")] == [actor, critic]

    share = {"actor": 12 * -(-actor // 16), "critic": 12 * -(-critic // 32)}  # main weights and moments
    # With the reference model.
    left = {"actor": 2 * 2 * actor + share["actor"], "critic": 2 * critic + share["critic"]}
    states = sum(8 * (role.state // 64) for role in memory.roles.values())
    sequences = 2048 * (10240 * 4 + 2 * 8)
    cells = 2048 * 8192
    always = {
        "offloaded": 8 * sum(left.values()),  # exact: with offloaded roles, not rounded, no engine weights
        "rollouts in ranks": 8 * (2 * sequences + cells * (9 + 4 + 9)),
        "libraries": MIB * (17 * 400 + 8 * 550),
        "object store": 2 * (sequences + cells * 13),
        "states being written": states,  # every rank writes its shard
    }
    saving = {"samples and records": memory.driver.records, "staging": 8 * 128 * MIB}
    assert _lines(node, "actor_save") == Counter(always) + Counter(saving)
    assert node is not None
    loading = {"offloaded": 8 * left["actor"]}
    same = {name: size for name, size in (always | saving).items() if name in _ALWAYS}
    assert _lines(node, "critic_load") == Counter(same) + Counter(loading)

    resting = {
        "CUDA contexts": 3 * int(0.6 * GIB),
        "NCCL": 2 * 5 * GIB // 4,  # an engine is one process
        "CUDA graphs": GIB,
        "actor gather buffer": 5120 * 2 * 3584,
    }
    rank = memory.roles["critic"].largest
    training = {
        "critic weights": 2 * critic,
        "critic gradients": 4 * critic,
        "critic optimizer": share["critic"],
        "critic activations": rank.update,
        "fragments": int(0.1 * rank.update),
    }
    assert _lines(gpu, "critic_update") == Counter(resting) + Counter(training)
    assert gpu.fullest.stage == "critic_update"
    assert gpu.fullest.bytes == sum(resting.values()) + sum(training.values())
