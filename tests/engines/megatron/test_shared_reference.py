"""A reference that shares frozen weights and the frozen trunk with the actor, compared with two complete models."""

import ctypes
import gc
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from layout_lab import STEP, settings_of, started_actor
from rank_pool import RankPool
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.frozen_parameters import trained_names
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

pytestmark = pytest.mark.engines

EVERYTHING = Trainable()
PARTS = {
    "top": Trainable(top_layers=1),
    "top without queries": Trainable(top_layers=2, freeze=("*.linear_q*", "decoder.final_layernorm.weight")),
    "norm and output layer": Trainable(freeze=("embedding.*", "decoder.layers.*")),
    "embedding": Trainable(freeze=("decoder.layers.*",)),
    "a part of the first layer": Trainable(freeze=("embedding.*", "*.linear_fc1.*", "decoder.layers.[1-9].*")),
}
CASES = [
    ("qwen2-six", "top"),
    ("qwen2-deep", "top without queries"),
    ("qwen3-moe", "top"),
    ("qwen2-six", "norm and output layer"),
    ("qwen2-deep", "embedding"),
    ("qwen2-six", "a part of the first layer"),
    ("gemma2", "top"),
    ("gemma3", "top without queries"),
    ("deepseek-v3", "top without queries"),
    ("qwen2-moe-mixed", "top"),
]
FILTERED = OutputRequest(temperature=0.8, entropy=True, top_p=0.9, min_new_tokens=3, stop_token_ids=(7, 90))
PLAIN = OutputRequest(temperature=0.8)
BOTH = OutputRequest(temperature=0.8, top_k=40, reference=True)


def of_part(folder: Path, trainable: Trainable, **changes: Any) -> TrainerSettings:
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    made = TrainerSettings("actor", str(folder), torch.float32, batching, trainable=trainable)
    return replace(made, **changes)


def started(folder: Path, trainable: Trainable, **changes: Any) -> MegatronActor:
    return lab.started(of_part(folder, trainable, **changes))


def train(actor: MegatronActor) -> None:
    rollouts = lab.make_rollouts(seed=4)
    minibatches = [lab.minibatch(rollouts, rows, step=STEP) for rows in ((0, 1, 2), (3, 4))]
    actor.update(rollouts, minibatches, lab.policy_objective(rollouts))


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(("kind", "part"), CASES, ids=[f"{kind}-{part}" for kind, part in CASES])
def test_outputs_are_those_of_two_complete_models(model, tmp_path, kind, part):
    folder = lab.with_ends(model(kind), tmp_path / "base", (5, 33))
    actor, rollouts = started(folder, PARTS[part]), lab.make_rollouts()
    level = FLOAT32 if kind == "deepseek-v3" else EXACT
    train(actor)
    (tmp_path / "trained").mkdir()
    actor.save_weights(tmp_path / "trained")
    initial = started(folder, EVERYTHING)
    complete = started(tmp_path / "trained", EVERYTHING, reference=str(folder))
    found = actor.logprobs(rollouts, replace(FILTERED, reference=True))
    expected = complete.logprobs(rollouts, FILTERED)
    frozen = initial.logprobs(rollouts, PLAIN).primary
    level.check(found.primary, expected.primary)
    level.check(found.entropy, expected.entropy)
    level.check(found.reference, frozen)
    level.check(actor.reference_logprobs(rollouts, PLAIN), frozen)
    level.check(actor.logprobs(rollouts, PLAIN).primary, complete.logprobs(rollouts, PLAIN).primary)
    full = replace(FILTERED, full_kl=True)
    level.check(actor.logprobs(rollouts, full).full_kl, complete.logprobs(rollouts, full).full_kl)
    by_transformers, _ = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, 0.8)
    torch.testing.assert_close(frozen, by_transformers, atol=1e-4, rtol=0)
    assert float((complete.logprobs(rollouts, PLAIN).primary - frozen)[rollouts.mask].abs().max()) > 0.01
    assert own_bytes(lab.rank_of(actor)) == trained_bytes(lab.rank_of(actor)) < all_bytes(lab.rank_of(actor))


def own_bytes(rank: MegatronRank) -> int:
    return sum(weight.nbytes for weight in rank._reference.weights())


def trained_bytes(rank: MegatronRank) -> int:
    return sum(weight.nbytes for model in rank.models for weight in model.parameters() if weight.requires_grad)


def all_bytes(rank: MegatronRank) -> int:
    return sum(weight.nbytes for model in rank.models for weight in model.parameters())


def test_reference_in_bfloat16_with_recomputation_is_the_initial_model(model):
    how = {"dtype": torch.bfloat16, "recompute": "full"}
    actor, rollouts = started(model("qwen2-deep"), PARTS["top without queries"], **how), lab.make_rollouts()
    train(actor)
    expected = started(model("qwen2-deep"), EVERYTHING, **how).logprobs(rollouts, PLAIN).primary
    found = actor.logprobs(rollouts, BOTH)
    EXACT.check(found.reference, expected)
    EXACT.check(found.primary, actor.logprobs(rollouts, replace(BOTH, reference=False)).primary)
    assert own_bytes(lab.rank_of(actor)) == trained_bytes(lab.rank_of(actor))


def test_trunk_runs_once_for_actor_and_reference(model, monkeypatch):
    """Three microbatches of a model with six layers, of which two are in each top."""
    actor = started(model("qwen2-six"), Trainable(top_layers=2))
    actor.reference_logprobs(lab.make_rollouts(), PLAIN)
    rank, calls = lab.rank_of(actor), Counter[str]()
    for owner, stage in (("actor", rank.models[0]), ("reference", rank._reference.stages()[0])):
        for number, layer in enumerate(stage.decoder.layers):
            layer.register_forward_hook(lambda *_, name=f"{owner} {number}": calls.update([name]))
    actor.logprobs(lab.make_rollouts(), BOTH)
    expected = [f"actor {number}" for number in range(6)] + ["reference 4", "reference 5"]
    assert calls == dict.fromkeys(expected, 3)


def test_shared_weights_are_the_tensors_of_the_actor(model, tmp_path):
    """After a start, and after a load of a trained state by an actor that has used its reference."""
    rollouts, part = lab.make_rollouts(), PARTS["top without queries"]
    actor = started(model("qwen2-deep"), part)
    expected = actor.reference_logprobs(rollouts, PLAIN)
    train(actor)
    (tmp_path / "state").mkdir()
    lab.save(actor, tmp_path / "state")
    resumed = started(model("qwen2-deep"), part)
    resumed.reference_logprobs(rollouts, PLAIN)
    resumed.load(tmp_path / "state")
    for trained in (actor, resumed):
        [stage], [reference] = lab.rank_of(trained).models, lab.rank_of(trained)._reference.stages()
        own, frozen = trained_names(stage), dict(reference.named_parameters())
        assert {name for name, weight in stage.named_parameters() if frozen[name] is not weight} == own
        EXACT.check(trained.logprobs(rollouts, BOTH).reference, expected)
    EXACT.check(resumed.logprobs(rollouts, PLAIN).primary, actor.logprobs(rollouts, PLAIN).primary)


def test_weights_that_train_are_read_from_a_megatron_folder(model, tmp_path):
    """The folder is a saved state, whose weights are not those of the Hugging Face folder."""
    rollouts, whole = lab.make_rollouts(), started(model("qwen2-deep"), EVERYTHING)
    train(whole)
    (tmp_path / "state").mkdir()
    lab.save(whole, tmp_path / "state")
    actor = started(tmp_path / "state", PARTS["top without queries"])
    train(actor)
    EXACT.check(actor.logprobs(rollouts, BOTH).reference, whole.logprobs(rollouts, PLAIN).primary)
    assert own_bytes(lab.rank_of(actor)) == trained_bytes(lab.rank_of(actor))


def test_reference_with_a_path_of_its_own_shares_nothing(model, tmp_path):
    other = lab.with_scaled_weights(model("qwen2-deep"), tmp_path / "other")
    actor = started(model("qwen2-deep"), PARTS["top"], reference=str(other))
    found = actor.logprobs(lab.make_rollouts(), BOTH)
    EXACT.check(found.reference, started(other, EVERYTHING).logprobs(lab.make_rollouts(), PLAIN).primary)
    assert own_bytes(lab.rank_of(actor)) == all_bytes(lab.rank_of(actor))


def test_offload_moves_only_own_weights_and_reload_brings_those_of_the_actor(model):
    actor, rollouts = started(model("qwen2-six"), PARTS["top"]), lab.make_rollouts()
    rank = lab.rank_of(actor)
    train(actor)
    expected = actor.logprobs(rollouts, BOTH)
    rank.offload()
    assert sum(weight.untyped_storage().nbytes() for weight in rank._reference.weights()) == 0
    assert sum(weight.untyped_storage().nbytes() for weight in rank.models[0].parameters()) == 0
    EXACT.check(actor.reference_logprobs(rollouts, PLAIN), expected.reference)
    rank.offload()
    found = actor.logprobs(rollouts, BOTH)
    EXACT.check(found.primary, expected.primary)
    EXACT.check(found.reference, expected.reference)
    rank.offload()
    EXACT.check(actor.logprobs(rollouts, PLAIN).primary, actor.logprobs(rollouts, PLAIN).primary)
    [frozen] = [weight for name, weight in rank.models[0].named_parameters() if "embedding" in name]
    assert frozen.untyped_storage().nbytes() == frozen.nbytes
    assert sum(weight.untyped_storage().nbytes() for weight in rank._reference.weights()) == 0
    host = rank._host.bytes
    assert all_bytes(rank) < host < all_bytes(rank) + 5 * trained_bytes(rank) + 50_000


def test_shared_weights_never_exist_twice(tmp_path):
    """Measured peak while a process builds the reference, reads its weights and computes. The model has 92 MB in
    six layers and 9 MB in embedding and output layer."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 2200}
    config = Qwen2Config(**{**lab.SIZES, **sizes, "num_attention_heads": 8, "tie_word_embeddings": False})
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    rollouts, grown = lab.make_rollouts(), {}
    for name, part in {"shared": PARTS["top"], "complete": EVERYTHING}.items():
        actor = started(tmp_path, part)
        actor.logprobs(rollouts, PLAIN)
        before = resident_peak(reset=True)
        actor.logprobs(rollouts, BOTH)
        grown[name] = resident_peak() - before
        own = own_bytes(lab.rank_of(actor))
        assert (own == all_bytes(lab.rank_of(actor))) == (name == "complete")
        # Pages of the weights that are read from the file are counted too.
        assert own <= grown[name] <= 2 * own + 16e6, (own, grown)
    assert grown["shared"] < 60e6 < 100e6 < grown["complete"]


def resident_peak(*, reset: bool = False) -> int:
    """Return the largest number of bytes that were resident since the last reset."""
    if reset:
        # Freed memory of earlier tests would be used again, and the growth would be too small.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(peak)


SPLIT = ("PP2", "PP2 interleaved", "CP2", "TP2 PP2 interleaved")
TRUNKS = [
    *((layout, "qwen2-deep", 3) for layout in ("TP2 sequence", "DP2 sharded", *SPLIT)),
    *((layout, "qwen2-deep", 2) for layout in SPLIT),
    *((layout, "qwen2-deep", 1) for layout in ("PP2", "PP2 interleaved")),
    *((layout, "qwen3-moe", 2) for layout in ("EP2", "TP2 sequence")),
]


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("layout", "kind", "top"), TRUNKS, ids=[f"{layout}-{kind}-{top}" for layout, kind, top in TRUNKS]
)
def test_outputs_do_not_depend_on_layout(pool, model, layout, kind, top):
    check_outputs(pool, settings_of(model, kind, layout, trainable=Trainable(top_layers=top)))
    assert pool.examine(own_bytes) == pool.examine(trained_bytes)


def check_outputs(pool: RankPool, made: TrainerSettings) -> None:
    """Compare an actor and its reference with those of one process, after the same updates."""
    rollouts, full = lab.make_rollouts(), OutputRequest(temperature=0.8, full_kl=True)
    alone, actor = started(Path(made.model), made.trainable), started_actor(pool, made)
    updates = 1 if made.trainable.lora is None else 2  # the first update leaves A of an adapter as it is
    for each in (alone, actor):
        each.update(rollouts, [lab.minibatch(rollouts, step=STEP)] * updates, lab.policy_objective(rollouts))
    expected, found = alone.logprobs(rollouts, BOTH), actor.logprobs(rollouts, BOTH)
    FLOAT32.check(found.reference, expected.reference)
    torch.testing.assert_close(found.primary, expected.primary, atol=1e-3, rtol=0)
    EXACT.check(actor.reference_logprobs(rollouts, PLAIN), found.reference)
    EXACT.check(actor.logprobs(rollouts, replace(BOTH, reference=False)).primary, found.primary)
    expected_kl, found_kl = alone.logprobs(rollouts, full).full_kl, actor.logprobs(rollouts, full).full_kl
    torch.testing.assert_close(found_kl, expected_kl, atol=1e-3, rtol=0)
    assert float(expected_kl.max()) > 0.01
    pool.call("offload")
    EXACT.check(actor.logprobs(rollouts, BOTH).reference, found.reference)
