"""Experts that change while the engine runs: verified expert by expert from the memory with which vLLM computes, and
equal to those of an engine that starts with them. Every way in which experts can go wrong is planted and named."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm_bench import settings_for

from end_to_end.tiny_models import MODELS, tiny_model
from ppoctl.core.errors import WeightSyncError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.engine import Engine, GenerationOutput, GenerationRequest
from ppoctl.engines.weights.canary import CanaryScores
from ppoctl.models.convert.adapters import constant_names
from ppoctl.models.convert.checksum import SentChecksums, checksum_of, require_equal
from ppoctl.models.lora import Lora
from ppoctl.models.model import Model
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable
from vllm_in_process import engines_are_guests
from vllm_prepared_once import prepare_once

pytestmark = pytest.mark.engines

PROMPT = tuple(range(5, 25))
Weights = dict[str, Tensor]


class Running:
    """An engine in this process, and the weights that it should hold."""

    def __init__(self, kind: str, folder: Path, *, dtype: str, width: int) -> None:
        """`width`: of an expert; vLLM pads it to a multiple of 32."""
        self.dtype, self.folder = dtype, tiny_model(kind, folder, moe_intermediate_size=width)
        self.weights = self._converted(load_file(self.folder / "model.safetensors"))
        self.engine = self._start(None)

    def _converted(self, weights: Weights) -> Weights:
        # The bias of the router is float32 in every model.
        return {
            name: weight if "e_score" in name else weight.to(getattr(torch, self.dtype))
            for name, weight in weights.items()
        }

    def _start(self, folder: Path | None) -> Engine:
        plain = settings_for(self.folder, dtype=self.dtype)  # type: ignore[arg-type]
        settings = dataclasses.replace(plain, max_model_len=192, returns_experts=True)
        return Engine(settings, folder=None if folder is None else str(folder))

    def moved(self, by: float) -> Weights:
        """Return other weights: each moves by about this much."""
        moved = {
            name: weight + (by * torch.randn_like(weight)).to(weight.dtype) for name, weight in self.weights.items()
        }
        self.weights = moved
        return moved

    def load(self, weights: Weights, *, at_once: int = 7) -> None:
        """Load these weights in buckets that end within a layer, and verify all weights."""
        self.engine.begin_weights()
        items = list(weights.items())
        for start in range(0, len(items), at_once):
            self.engine.load(items[start : start + at_once])
        sent = SentChecksums({name: checksum_of(weight) for name, weight in self.weights.items()})
        require_equal(list(self.weights), sent, self.engine.end_weights())

    def scores(self) -> CanaryScores:
        return self.engine.score(PROMPT, 4)

    def scores_of_a_new_engine(self) -> CanaryScores:
        folder = self.folder / "moved"
        folder.mkdir(exist_ok=True)
        for file in self.folder.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file(self.weights, folder / "model.safetensors", {"format": "pt"})
        engine = self._start(folder)
        try:
            return engine.score(PROMPT, 4)
        finally:
            engine.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    prepare_once()
    engines_are_guests()
    made: dict[tuple[str, str, int], Running] = {}

    def of(kind: str, dtype: str, width: int) -> Running:
        key = kind, dtype, width
        if key not in made:
            made[key] = Running(kind, tmp_path_factory.mktemp(kind), dtype=dtype, width=width)
        return made[key]

    yield of
    for each in made.values():
        each.engine.close()


CASES = [("qwen3_moe", "float32", 64), ("qwen2_moe", "bfloat16", 48), ("deepseek_v3", "float32", 48)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_change_in_place_as_in_a_new_engine(
    running: Callable[..., Running], case: tuple[str, str, int]
) -> None:
    one = running(*case)
    assert one.engine.takes_weights()
    one.load(one.weights)
    before = one.scores()
    one.load(one.moved(0.05))
    assert one.scores() != before
    assert one.scores() == one.scores_of_a_new_engine()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_that_are_not_sent_stay(running: Callable[..., Running], case: tuple[str, str, int]) -> None:
    """A run may train no experts, or adapters only: the kernels of their layers must come back."""
    one = running(*case)
    one.load(one.moved(0.01))
    shape = read_shape(one.folder)
    constant = constant_names(Model(shape, "token", Trainable(lora=Lora(2, 4.0))))
    adapted = one.weights.keys() - constant
    assert not [name for name in adapted if ".experts." in name or name.endswith(".gate.weight")]
    assert any("shared_expert" in name for name in adapted) == bool(shape.experts and shape.experts.shared_width)
    for sent in ({name for name in one.weights if ".experts." not in name}, adapted):
        moved = {name: weight + 0.01 for name, weight in one.weights.items() if name in sent}
        one.weights = {**one.weights, **moved}
        one.load(moved)
    assert one.scores() == one.scores_of_a_new_engine()


def chosen_by_transformers(folder: Path, sequence: list[int]) -> Tensor:
    """Return the experts that the routers of transformers choose for these tokens: [tokens layers k]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, outputs: found.append(outputs[2]))
    with torch.no_grad():
        model(torch.tensor([sequence]))
    return torch.stack(found, dim=1)


def test_engine_returns_the_experts_of_its_routers(running: Callable[..., Running]) -> None:
    """For each request that asks for them, also if an earlier request had the same prompt, longer than a block of the
    KV cache."""
    one = running(*CASES[0])
    one.weights = load_file(one.folder / "model.safetensors")
    one.load(one.weights)
    requests = [GenerationRequest(str(seed), 7 * PROMPT + PROMPT[: 1 + seed % 2], seed) for seed in range(5)]
    asking = SamplingParams(temperature=1.0, max_new_tokens=9, returns_experts=True)
    finished: list[GenerationOutput] = []
    for params in (dataclasses.replace(asking, returns_experts=False), asking):
        begun, ended = requests, list[GenerationOutput]()
        while len(ended) < len(requests):
            ended += one.engine.advance(begun, params)
            begun = []
        finished += sorted(ended, key=lambda output: output.id)
    for request, output in zip(requests, finished[len(requests) :], strict=True):
        sequence = [*request.prompt, *output.tokens[:-1]]
        found = torch.tensor(list(output.experts)).view(len(sequence), 2, 2)
        expected = chosen_by_transformers(one.folder, sequence)
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    assert [output.experts for output in finished[: len(requests)]] == [b""] * len(requests)
    assert not one.engine._llm.collective_rpc("ppoctl_take_experts", args=({},))[0]


def _swapped(weights: Weights) -> Weights:
    one, other = "model.layers.1.mlp.experts.0.up_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
    return {**weights, one: weights[other], other: weights[one]}


def _gate_as_up(weights: Weights) -> Weights:
    one, other = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.3.gate_proj.weight"
    return {**weights, one: weights[other], other: weights[one]}


def _half_of_a_layer(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if "layers.1.mlp.experts.3" not in name}


def _stale_layer(weights: Weights) -> Weights:
    return {name: weight for name, weight in weights.items() if "layers.1.mlp.experts" not in name}


def _one_element(weights: Weights) -> Weights:
    name = "model.layers.1.mlp.experts.1.down_proj.weight"
    changed = weights[name].clone()
    changed[3, 5] += 1e-6
    return {**weights, name: changed}


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (_swapped, "experts.0.up_proj"),
        (_gate_as_up, "experts.3.gate_proj"),
        (_half_of_a_layer, "experts.3.gate_proj"),
        (_stale_layer, "experts.0.gate_proj"),
        (_one_element, "experts.1.down_proj"),
    ],
)
def test_wrong_expert_is_named(
    running: Callable[..., Running], fault: Callable[[Weights], Weights], named: str
) -> None:
    one = running("qwen3_moe", "float32", 64)
    one.load(one.moved(1e-3))
    with pytest.raises(WeightSyncError, match=rf"weight `model\.layers\.1\.mlp\.{named}\.weight` was sent as"):
        one.load(fault(one.moved(1e-3)))
    one.load(one.weights)


def test_shapes_of_the_tiny_models_need_padding_and_do_not() -> None:
    assert {width % 32 == 0 for _, _, width in CASES} == {True, False}
    assert {kind for kind, _, _ in CASES} == {
        kind for kind, shape in MODELS.items() if "moe_intermediate_size" in shape
    }
