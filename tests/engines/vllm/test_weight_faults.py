"""Every way in which a weight update can go wrong, planted: errors as small as one optimizer step are detected and
named.

`TINY` moves each weight by about 1e-6, as one Adam step at that learning rate does. A comparison of log-probs cannot
detect that.
"""

import dataclasses
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path

import pytest
import torch
from vllm_bench import WINDOW, Bench, prompts, settings_for

from ppoctl.core.batch.records import State
from ppoctl.core.errors import WeightSyncError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm import vllm_weights
from ppoctl.engines.vllm.engine import Engine, GenerationOutput
from ppoctl.engines.vllm.generator import VllmGenerator
from ppoctl.engines.weights.bucket import NamedTensors
from ppoctl.engines.weights.canary import Canary, CanaryScores
from ppoctl.engines.weights.engine_calls import call_engines
from ppoctl.engines.weights.sending import PARTS, NamedWeights
from ppoctl.engines.weights.sync import EngineSide
from ppoctl.models.trainable import Trainable
from vllm_in_process import Here

pytestmark = pytest.mark.engines

TINY = 1e-6
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)


def generate(bench: Bench) -> None:
    bench.generate(prompts(2), SAMPLING)


def damaging(bench: Bench, damage: Callable[[NamedTensors], NamedTensors]) -> AbstractContextManager[None]:
    """Context in which the engine loads damaged tensors."""
    return bench.host.replacing("take_weights", lambda engine, bucket: Engine.load(engine, damage(bucket.tensors())))


def test_equal_state_sends_nothing_and_new_state_sends_weights(tied: Bench) -> None:
    tied.trainer.move(0.01)
    generate(tied)
    tied.trainer.traffic.clear()
    generate(tied)
    assert tied.trainer.traffic == []
    tied.trainer.move(TINY)
    generate(tied)
    assert len(tied.trainer.traffic) == len(dict(tied.trainer.model.named_parameters()))


def test_engine_starts_without_reading_weights_from_folder(tied: Bench, tmp_path: Path) -> None:
    """The transfer would replace all of them. The folder has none here: the engine starts, and holds the received
    weights, verified by checksum."""
    folder = tmp_path / "without weights"
    shutil.copytree(tied.trainer.folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    host = Here(settings_for(folder))
    side = EngineSide([host], list)
    generator = VllmGenerator(settings_for(folder), tied.trainer.at, side, print)
    try:
        assert call_engines([host], "takes_weights") == [True]
        with pytest.raises(WeightSyncError, match="was called before it received weights"):
            call_engines([host], "score", (5, 6, 7), 1)
        bench = Bench(tied.trainer, generator, side)
        assert bench.worst_gap(prompts(4), SAMPLING) < 1e-3
    finally:
        generator.close()


def test_checksums_catch_skipped_load_that_canary_misses(bench: Bench) -> None:
    generate(bench)
    bench.trainer.move(TINY)
    engine = bench.engine
    assert engine is not None
    canary = Canary.of("float32", WINDOW, tolerance=None)
    tokens = canary.tokens(engine.vocab_size())
    scores = engine.score(tokens, canary.num_drawn)
    scored = tuple(bench.trainer.logprobs(tokens + scores.sampled))
    canary.check(scores, CanaryScores(scored[: len(tokens) - 1], scores.sampled, scored[len(tokens) - 1 :]))
    skipped = pytest.raises(WeightSyncError, match=r"weight `.*` was sent as float32.* but the engine holds float32")
    with damaging(bench, lambda tensors: []), skipped:
        generate(bench)


def test_failed_load_is_repeated_for_same_state(bench: Bench) -> None:
    bench.trainer.move(0.05)
    with damaging(bench, lambda tensors: tensors[:-3]), pytest.raises(WeightSyncError):
        generate(bench)
    assert bench.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_stale_tied_head_is_caught_by_name(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tied)
    tied.trainer.move(TINY)
    monkeypatch.setattr(vllm_weights, "repack_heads", lambda model: None)
    with pytest.raises(WeightSyncError, match=r"`lm_head.weight` was sent with `model.embed_tokens.weight`"):
        generate(tied)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.bias", "model.layers.0.mlp.up_proj.weight"])
def test_unsent_tensor_is_caught_by_name(tied: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole = tied.trainer.weights

    def without(state: State) -> NamedWeights:
        weights = whole(state)
        kept = [bucket for bucket in weights.buckets(PARTS) if name not in bucket.checksums]
        return dataclasses.replace(weights, buckets=lambda parts: iter(kept))

    tied.trainer.move(TINY)
    monkeypatch.setattr(tied.trainer, "weights", without)
    with pytest.raises(WeightSyncError, match=f"`{name}` was announced but never sent"):
        generate(tied)


def test_tensor_sent_twice_is_caught_by_name(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tied.trainer.weights

    def twice(state: State) -> NamedWeights:
        weights = whole(state)
        return dataclasses.replace(
            weights, buckets=lambda parts: chain(weights.buckets(PARTS), weights.buckets(PARTS))
        )

    tied.trainer.move(TINY)
    with monkeypatch.context() as planted:
        planted.setattr(tied.trainer, "weights", twice)
        with pytest.raises(WeightSyncError, match=r"`model.embed_tokens.weight` left the trainer twice"):
            generate(tied)
    assert tied.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_tensor_missing_from_announcement_is_caught_by_name(untied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = untied.trainer.weights

    def forgetful(state: State) -> NamedWeights:
        weights = whole(state)
        kept = [bucket for bucket in weights.buckets(PARTS) if "lm_head.weight" not in bucket.checksums]
        names = tuple(name for bucket in kept for name in bucket.checksums)
        return dataclasses.replace(weights, names=names, buckets=lambda parts: iter(kept))

    untied.trainer.move(TINY)
    monkeypatch.setattr(untied.trainer, "weights", forgetful)
    with pytest.raises(WeightSyncError, match=r"`lm_head.weight` is held by the engine .* but was not sent"):
        generate(untied)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"]
)
def test_flipped_bit_in_transfer_is_caught_by_name(untied: Bench, name: str) -> None:
    def corrupt(arrived: NamedTensors) -> NamedTensors:
        tensors = [(key, tensor.clone()) for key, tensor in arrived]
        if name in dict(tensors):
            dict(tensors)[name].view(torch.int32).view(-1)[7] ^= 1
        return tensors

    untied.trainer.move(TINY)
    with damaging(untied, corrupt), pytest.raises(WeightSyncError, match=f"`{name}` was sent as"):
        generate(untied)


def test_swapped_tensors_are_caught(untied: Bench) -> None:
    other = {"model.layers.0.mlp.up_proj.weight": "gate", "model.layers.0.mlp.gate_proj.weight": "up"}

    def exchange(arrived: NamedTensors) -> NamedTensors:
        return [
            (f"model.layers.0.mlp.{other[key]}_proj.weight" if key in other else key, tensor)
            for key, tensor in arrived
        ]

    untied.trainer.move(TINY)
    caught = pytest.raises(WeightSyncError, match=r"mlp\.(gate|up)_proj\.weight` was sent as")
    with damaging(untied, exchange), caught:
        generate(untied)


def test_weights_of_other_state_are_rejected(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tied.trainer.weights(tied.trainer.state)
    tied.trainer.move(TINY)
    monkeypatch.setattr(tied.trainer, "weights", lambda state: stale)
    with pytest.raises(WeightSyncError, match="returned weights of"):
        generate(tied)


def test_canary_catches_engine_that_computes_other_function(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tied.trainer.move(TINY)
    buffers = tied.trainer.model.model.rotary_emb._buffers
    monkeypatch.setitem(buffers, "inv_freq", buffers["inv_freq"] / 2)
    with pytest.raises(WeightSyncError, match=r"canary log-probs .* nats \(max over 47 tokens; allowed 0.001"):
        generate(tied)


def test_canary_catches_kv_cache_corrupted_during_decoding(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    tied.trainer.move(TINY)
    generate(tied)
    engine = tied.engine
    worker = engine._llm.engine_core.engine_core.model_executor.driver_worker
    step, caches = engine.step, worker.model_runner.kv_caches

    def forgetful() -> list[GenerationOutput]:
        finished = step()
        caches[0].zero_()  # of the first layer, after the prompt has been scored from it
        return finished

    tied.trainer.move(TINY)
    monkeypatch.setattr(engine, "step", forgetful)
    with pytest.raises(WeightSyncError, match=r"canary .* nats \(max over 8 generated tokens;"):
        generate(tied)
    monkeypatch.undo()
    assert tied.worst_gap(prompts(2), SAMPLING) < 1e-3


def test_kv_cache_of_old_weights_is_unused_even_without_reset(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompts longer than a cache block (128 tokens on a CPU).
    long = prompts(2, length=200)
    llm = tied.engine._llm
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: True)
    assert tied.worst_gap(long, SAMPLING) < 1e-3
    tied.trainer.move(0.1)
    assert tied.worst_gap(long, SAMPLING) < 1e-3

    # Without the salt: this case is the reason for the two measures.
    add_request = llm.add_request
    monkeypatch.setattr(
        llm, "add_request", lambda id, prompt, params: add_request(id, {**prompt, "cache_salt": "same"}, params)
    )
    assert tied.worst_gap(long, SAMPLING) < 1e-3
    tied.trainer.move(0.1)
    assert tied.worst_gap(long, SAMPLING) > 1.0


def test_failed_prefix_cache_reset_raises_error(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tied)
    tied.trainer.move(TINY)
    monkeypatch.setattr(tied.engine._llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(WeightSyncError, match="KV cache of the old weights"):
        generate(tied)


def test_negative_zeros_and_denormals_pass_checksums(untied: Bench) -> None:
    untied.trainer.move(TINY)
    with torch.no_grad():
        for parameter in untied.trainer.model.parameters():
            numbers = parameter.view(-1)
            numbers[0], numbers[1] = -0.0, 1e-40
    assert untied.worst_gap(prompts(2), SAMPLING) < 1e-3


@pytest.fixture(params=["tied", "untied"])
def partly(request: pytest.FixtureRequest, benches: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Return a bench that has made one transfer, whose trainer trains the upper of two layers."""
    bench = benches(request.param)
    monkeypatch.setattr(bench.trainer, "trainable", Trainable(top_layers=1))
    bench.trainer.move(0.01)
    generate(bench)
    bench.trainer.traffic.clear()
    return bench


def sent_again(bench: Bench) -> list[str]:
    """Return the names of the tensors of a transfer after an update."""
    bench.trainer.move(TINY)
    bench.trainer.traffic.clear()
    generate(bench)
    return bench.trainer.traffic


def test_frozen_weights_are_sent_once(partly: Bench) -> None:
    names = list(dict(partly.trainer.model.named_parameters()))
    trained = [name for name in names if name.startswith(("model.layers.1.", "model.norm.", "lm_head."))]
    assert sent_again(partly) == trained
    assert len(trained) in (13, 14)
    assert partly.worst_gap(prompts(4), SAMPLING) < 1e-3
    assert sent_again(partly) == trained


def test_flipped_bit_of_a_frozen_weight_in_the_engine_is_caught(partly: Bench) -> None:
    """The transfer does not send the weight. The next transfer sends everything, and corrects it."""
    executor = partly.engine._llm.engine_core.engine_core.model_executor
    held = dict(executor.driver_worker.model_runner.get_model().named_parameters())
    held["model.layers.0.input_layernorm.weight"].data.view(torch.int32)[5] ^= 1
    with pytest.raises(WeightSyncError, match=r"`model\.layers\.0\.input_layernorm\.weight` was sent as"):
        sent_again(partly)
    assert "model.layers.0.input_layernorm.weight" not in partly.trainer.traffic
    assert len(sent_again(partly)) == len(dict(partly.trainer.model.named_parameters()))
    assert partly.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_engine_without_weights_gets_frozen_weights_again(partly: Bench) -> None:
    every = len(dict(partly.trainer.model.named_parameters()))
    partly.engine.sleep()
    assert len(sent_again(partly)) == every
    assert len(sent_again(partly)) < every
    partly.hosts.engines[0].close()
    assert len(sent_again(partly)) == every
    assert partly.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_block_with_a_frozen_parameter_is_sent_whole(untied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads a fused layer only if all of its tensors arrive."""
    freeze = ("*.linear_qkv.bias", "*.mlp.*", "embedding.*")
    monkeypatch.setattr(untied.trainer, "trainable", Trainable(freeze=freeze))
    generate(untied)
    sent_again(untied)  # the first transfer with a frozen part
    names = list(dict(untied.trainer.model.named_parameters()))
    assert sent_again(untied) == [name for name in names if "mlp" not in name and "embed" not in name]
    assert untied.worst_gap(prompts(4), SAMPLING) < 1e-3


def test_weight_loading_during_generation_is_rejected(tied: Bench) -> None:
    long = SamplingParams(temperature=1.0, max_new_tokens=64)
    stream = tied.open(prompts(12), long)
    stream.finished()
    engine = tied.engine
    with pytest.raises(WeightSyncError, match="while it is generating"):
        engine.begin_weights()
    stream.close()
