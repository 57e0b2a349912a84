"""The first optimizer steps in bfloat16 change the float32 main weights as in float32, for each part that is
initialized after the weights of the model: value head, adapters, reference, and optimizer on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from lora_lab import adapted
from safetensors.torch import load_file, save_file
from test_value_head import joint_objective
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences
from ppoctl.algorithms.stages.objective import Terms
from ppoctl.core.ports import Minibatch, OutputRequest
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronTrainer
from ppoctl.models.head import SharedValueHead
from ppoctl.models.trainable import Trainable
from tolerance import BFLOAT16, EXACT, FLOAT32

pytestmark = pytest.mark.engines

# With this eps, a step is nearly proportional to the gradient, so that a small gradient does not decide its sign.
STEP = replace(lab.STEP, lr=0.1, eps=1.0)
HEAD, ALL, TOP = SharedValueHead("mlp", 1), adapted("q_proj", "down_proj"), Trainable(top_layers=1)
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "actor": ("actor", {}, "decoder.final_layernorm.weight"),
    "value head": ("actor", {"value_head": HEAD}, "value_head.output_layer.weight"),
    "adapters": ("actor", {"trainable": ALL}, "lora_B"),
    "last layers": ("actor", {"trainable": TOP}, "decoder.layers.1.mlp.linear_fc2.weight"),
    "critic": ("critic", {}, "output_layer.weight"),
    "critic with adapters": ("critic", {"trainable": ALL}, "lora_B"),
    "optimizer on the CPU": ("actor", {"optimizer_on": "cpu"}, "decoder.final_layernorm.weight"),
    "value head and optimizer on the CPU": (
        "actor", {"value_head": HEAD, "optimizer_on": "cpu"}, "value_head.layers.0.mlp.linear_fc2.weight",
    ),
}  # fmt: skip
"""Name -> role, settings, and a part of the name of a weight that moves."""


@pytest.fixture(scope="module")
def rounded(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose weights are bfloat16 numbers, so that both dtypes start from the same weights."""
    folder = tmp_path_factory.mktemp("rounded") / "qwen2"
    lab.model_folder("qwen2", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: each.bfloat16().float() for name, each in weights.items()}, folder / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    return folder


def trained_weights(trainer: MegatronTrainer) -> dict[str, torch.nn.Parameter]:
    [stage] = lab.rank_of(trainer).models
    return {name: each for name, each in stage.named_parameters() if each.requires_grad}


def objective_of(trainer: MegatronTrainer, rollouts: lab.TrainerBatch) -> Terms:
    if trainer.settings.value_head is not None:
        return joint_objective(rollouts)
    make = lab.policy_objective if trainer.settings.role == "actor" else lab.value_objective
    return make(rollouts)


def two_steps(trainer: MegatronTrainer) -> tuple[list[float], dict[str, Tensor]]:
    """Take two steps. Return losses and gradient norms, and the change of each main weight."""
    rollouts, weights = lab.make_rollouts(), trained_weights(trainer)
    objective, every = objective_of(trainer, rollouts), torch.arange(rollouts.num_seqs)
    before = {name: weight.detach().float().clone() for name, weight in weights.items()}
    results = trainer.update(rollouts, [Minibatch(every, objective.totals(every), STEP)] * 2, objective)
    mains = {name: getattr(weight, "main_param", weight).detach() for name, weight in weights.items()}
    for name, weight in weights.items():
        EXACT.check(weight, mains[name].to(weight.dtype))
    numbers = [number for result in results for number in (result.loss, result.grad_norm)]
    return numbers, {name: mains[name] - before[name] for name in mains}


@pytest.mark.parametrize("case", CASES)
def test_first_steps_in_bfloat16_are_those_in_float32(rounded: Path, case: str) -> None:
    role, changes, moved = CASES[case]
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    made = replace(TrainerSettings(role, str(rounded), torch.float32, batching), **changes)
    [(numbers, expected), (found_numbers, found)] = [
        two_steps(lab.started(replace(made, dtype=dtype))) for dtype in (torch.float32, torch.bfloat16)
    ]
    assert found.keys() == expected.keys()
    assert max(float(each.norm()) for name, each in expected.items() if moved in name) > 0.0
    for number, other in zip(found_numbers, numbers, strict=True):
        BFLOAT16.check(number, other)
    # The first bound is for all weights together, the second for each weight.
    whole = torch.cat([each.flatten() for each in expected.values()]).norm()
    gap = torch.cat([(found[name] - each).flatten() for name, each in expected.items()]).norm()
    assert gap < whole / 16
    for name, each in expected.items():
        assert (found[name] - each).norm() < each.norm() / 4 + whole / 64, name


def test_values_of_a_head_in_bfloat16_are_computed_in_float32(rounded: Path) -> None:
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    actor = lab.started(TrainerSettings("actor", str(rounded), torch.bfloat16, batching, value_head=HEAD))
    two_steps(actor)
    head = lab.rank_of(actor).models[0].value_head
    hidden = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    first, last = head.hidden_layer, head.output_layer
    assert {each.dtype for each in head.parameters()} == {torch.bfloat16}
    inner = torch.relu(hidden.float() @ first.weight.float().T + first.bias.float())
    FLOAT32.check(head.values(hidden), (inner @ last.weight.float().T + last.bias.float())[:, 0])


@pytest.mark.parametrize("trainable", [Trainable(), TOP, ALL], ids=["own", "last layers", "adapters"])
def test_reference_that_is_first_read_after_an_update_is_the_initial_model(
    rounded: Path, trainable: Trainable
) -> None:
    batching, rollouts = BySequences(microbatch_seqs=2, logits_chunk_tokens=5), lab.make_rollouts()
    made = TrainerSettings("actor", str(rounded), torch.bfloat16, batching, trainable=trainable)
    actor, request = lab.started(made), OutputRequest(temperature=0.8)
    initial = actor.logprobs(rollouts, request).primary
    two_steps(actor)
    assert float((actor.logprobs(rollouts, request).primary - initial).abs().max()) > 0.0
    EXACT.check(actor.reference_logprobs(rollouts, request), initial)
    EXACT.check(actor.logprobs(rollouts, replace(request, reference=True)).reference, initial)
