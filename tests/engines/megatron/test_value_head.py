"""A value head on the policy's model: log-probs, values and the gradient of a joint loss equal those of two plain
models of transformers, whose lower layers are shared, under every layout.

A state is saved under one layout and loaded under another. Weights and gradients are read from the saved states: with
beta1 = 0, the first moment of Adam is the gradient.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from layout_lab import LAYOUTS, MOMENT, actor_of, gap, settings, settings_of, started_actor
from lora_lab import saved
from torch import Tensor

from ppoctl.algorithms.stages.critic_update import ClippedErrors
from ppoctl.algorithms.stages.objective import Term, Terms
from ppoctl.core.errors import StorageError
from ppoctl.core.ports import Minibatch, OutputRequest, TokenOutputs
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.models.convert.fused_views import part_of
from ppoctl.models.convert.hugging_face import Spec
from ppoctl.models.convert.parameters import MegatronWeights, Parameter, assembled, parameters
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.head import SharedValueHead
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

pytestmark = pytest.mark.engines

REQUEST = OutputRequest(temperature=0.8, entropy=True, values=True)
MOVE = replace(lab.STEP, lr=1e-2)
"""Moves the head away from its start, at which the layers before it get no gradient."""
LOOK = replace(lab.STEP, lr=1e-2, beta1=0.0)


def joint_objective(rollouts: lab.TrainerBatch) -> Terms:
    """Return a joint objective, in which the value term has a mask, a coefficient and a clip of its own."""
    returns, old = (
        torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(seed)) for seed in (4, 5)
    )
    seen = rollouts.mask & (torch.arange(rollouts.mask.numel()).view_as(rollouts.mask) % 5 != 1)
    policy = lab.policy_objective(rollouts, needs_entropy=True).terms
    value = Term(ClippedErrors(0.3 * old, returns, clip=0.8), seen, coef=0.3, name="value")
    return Terms((*policy, value), REQUEST)


def all_rows(rollouts: lab.TrainerBatch, objective: Terms, step: Any) -> Minibatch:
    every = torch.arange(rollouts.num_seqs)
    return Minibatch(every, objective.totals(every), step)


@dataclass
class Gradients:
    """Gradients under Hugging Face names, as `convert.parameters.assembled` reads them."""

    tensors: dict[str, Tensor]

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def copied_parameters(shape: ModelShape, head: SharedValueHead) -> dict[str, Parameter]:
    """Return name in the value head -> the parameter of the model that it is a copy of."""
    first = shape.num_layers - head.layers_copied
    names = {}
    for parameter in parameters(shape, "token"):
        layer = parameter.parts[0].layer
        if layer is not None and layer >= first:
            below = parameter.name.removeprefix(f"decoder.layers.{layer}.")
            names[f"value_head.layers.{layer - first}.{below}"] = parameter
        if parameter.name == "decoder.final_layernorm.weight" and head.layers_copied:
            names["value_head.final_layernorm.weight"] = parameter
    return names


def two_models(kind: str, shape: ModelShape, head: SharedValueHead, state: TorchDist) -> tuple[Any, Any, Any]:
    """Return the policy, the model below the value head, which shares all layers that are not copied, and the head,
    with the weights of a saved state, in float64."""
    policy = copy.deepcopy(lab.hugging_face_model(kind)).double()
    weights = MegatronWeights(state, shape, "token")
    with torch.no_grad():
        named = dict(policy.named_parameters())
        for name in weights.specs:
            named[name].copy_(weights.tensor(name))
        below = copy.deepcopy(policy.model)
        for name, parameter in copied_parameters(shape, head).items():
            stored = state.read(name)
            for part in parameter.parts:
                own = dict(below.named_parameters())[part.name.removeprefix("model.")]
                own.copy_(part_of(stored, part.place, shape).reshape(part.shape))
        below.embed_tokens = policy.model.embed_tokens
        for layer in range(shape.num_layers - head.layers_copied):
            below.layers[layer] = policy.model.layers[layer]
        below.norm = below.norm if head.layers_copied else policy.model.norm
        hidden = shape.hidden_size
        layers = {"output_layer": torch.nn.Linear(hidden, 1, bias=False)}
        if head.kind == "mlp":
            layers = {
                "hidden_layer": torch.nn.Linear(hidden, 2 * hidden),
                "output_layer": torch.nn.Linear(2 * hidden, 1),
            }
        top = torch.nn.ModuleDict(layers).double()
        for name, parameter in top.named_parameters():
            parameter.copy_(state.read(f"value_head.{name}"))
    return policy, below, top


def expected(
    kind: str, shape: ModelShape, head: SharedValueHead, state: TorchDist, rollouts: lab.TrainerBatch
) -> tuple[TokenOutputs, dict[str, Tensor]]:
    """Return outputs, and the gradient of the joint objective under the keys of a saved state."""
    policy, below, top = two_models(kind, shape, head, state)
    logprobs, entropy, values = (torch.zeros(rollouts.tokens.shape, dtype=torch.float64) for _ in range(3))
    for row, sequence in enumerate(rollouts.unpadded()):
        prompt, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
        place = slice(prompt - 1, prompt + length - 1)
        log_p = (policy(input_ids=sequence[None]).logits[0, place] / REQUEST.temperature).log_softmax(-1)
        logprobs[row, :length] = log_p.gather(1, sequence[prompt:, None])[:, 0]
        entropy[row, :length] = -(log_p.exp() * log_p).sum(-1)
        hidden = below(input_ids=sequence[None]).last_hidden_state[0, place]
        if head.kind == "mlp":
            hidden = top["hidden_layer"](hidden).relu()
        values[row, :length] = top["output_layer"](hidden)[:, 0]
    outputs, objective = TokenOutputs(logprobs, entropy, None, values), joint_objective(rollouts)
    every = torch.arange(rollouts.num_seqs)
    objective(every, outputs, objective.totals(every)).backward()
    gradients = {f"value_head.{name}": parameter.grad for name, parameter in top.named_parameters()}
    of_policy = Gradients({name: parameter.grad for name, parameter in policy.named_parameters()})
    for parameter in parameters(shape, "token"):
        key = parameter.key(shape, layers_alike=True)
        gradients[f"{key.name} {key.index}"] = assembled(parameter, of_policy, shape)
    of_copies = Gradients({f"model.{name}": parameter.grad for name, parameter in below.named_parameters()})
    for name, parameter in copied_parameters(shape, head).items():
        gradients[name] = assembled(parameter, of_copies, shape)
    return outputs.map(Tensor.detach), gradients


def read_moments(state: TorchDist, names: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first moments of Adam under these names."""
    found = {}
    for name in names:
        key, _, index = name.partition(" ")
        found[name] = state.read(MOMENT + key, tuple(int(digit) for digit in index.strip("(),").split(",") if digit))
    return found


CASES = {
    "linear": ("qwen2", SharedValueHead("linear"), "alone", "TP2 sequence", "none"),
    "copied layer of a tied model": ("qwen2-deep", SharedValueHead("mlp", 1), "TP2 sequence", "PP2", "none"),
    "two copied layers": ("qwen2-deep", SharedValueHead("linear", 2), "PP2", "CP2", "selective"),
    "mlp": ("qwen2", SharedValueHead("mlp"), "CP2", "DP2", "none"),
    "recomputed": ("qwen2", SharedValueHead("mlp", 1), "DP2", "alone", "full"),
    "norms of heads": ("qwen3", SharedValueHead("mlp", 1), "PP2", "TP2", "none"),
}
"""Name -> model, head, layout that saves, layout that loads and computes, recomputation."""


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.pinned] if name == "mlp" else []) for name in CASES]
)
def test_outputs_and_joint_gradient_are_those_of_two_plain_models(pool, model, tmp_path, case):
    kind, head, first, second, recompute = CASES[case]
    folder, rollouts = model(kind), lab.make_rollouts()
    shape, objective = read_shape(folder), joint_objective(rollouts)
    made = settings_of(model, kind, first, value_head=head, recompute=recompute)
    actor = started_actor(pool, made)
    assert not actor.logprobs(rollouts, REQUEST).values.any()  # the last layer is 0
    actor.update(rollouts, [all_rows(rollouts, objective, MOVE)], objective)
    before = saved(actor, tmp_path / "before")

    actor = actor_of(pool, replace(made, parallel=LAYOUTS[second]))
    actor.load(tmp_path / "before")
    said = actor.logprobs(rollouts, REQUEST)
    [result] = actor.update(rollouts, [all_rows(rollouts, objective, LOOK)], objective)
    outputs, gradients = expected(kind, shape, head, before, rollouts)
    assert float(outputs.values.abs().max()) > 0.01
    for found in (said, result.outputs):
        for name in ("primary", "entropy", "values"):
            FLOAT32.check(getattr(found, name), getattr(outputs, name))
    lab.check_all(lab.GRADIENT, read_moments(saved(actor, tmp_path / "after"), gradients), gradients)
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert abs(result.grad_norm - float(norm)) < 1e-4 * float(norm)


def single(folder: Path, head: SharedValueHead) -> MegatronActor:
    """Return an actor with a value head in this process, after a step that moved the head."""
    actor = lab.started(replace(settings(folder, "actor", ParallelTable()), value_head=head))
    objective = joint_objective(lab.make_rollouts())
    actor.update(lab.make_rollouts(), [all_rows(lab.make_rollouts(), objective, MOVE)], objective)
    return actor


def test_values_are_those_of_a_critic_with_the_same_weights(model, tmp_path):
    """The value of a token is that of the state before it. Without copied layers, the head is that of a critic."""
    actor, rollouts = single(model("qwen2"), SharedValueHead("linear")), lab.make_rollouts()
    actor.save_weights(tmp_path)
    critic = lab.critic(tmp_path)
    assert not critic.values(rollouts).any()
    weight = lab.rank_of(actor).models[0].value_head.output_layer.weight.detach()
    lab.rank_of(critic).models[0].output_layer.weight.data.copy_(weight)
    values = actor.logprobs(rollouts, REQUEST).values
    assert float(values.abs().max()) > 0.01
    FLOAT32.check(values, critic.values(rollouts))


def test_initial_head_does_not_depend_on_random_state_or_earlier_training(model):
    rollouts = lab.make_rollouts()
    torch.manual_seed(1)
    actor = single(model("qwen2"), SharedValueHead("mlp", 1))
    torch.manual_seed(2)
    actor.start()
    again = {name: each.clone() for name, each in lab.rank_of(actor).models[0].named_parameters()}
    other = lab.unstarted(actor.settings)
    other.start()
    for name, parameter in lab.rank_of(other).models[0].named_parameters():
        EXACT.check(again[name], parameter)
    hidden = again["value_head.hidden_layer.weight"].detach()
    bound = hidden.shape[1] ** -0.5
    assert 0.98 * bound < float(hidden.abs().max()) <= bound
    assert float(hidden.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
    EXACT.check(again["value_head.layers.0.mlp.linear_fc1.weight"], again["decoder.layers.1.mlp.linear_fc1.weight"])
    EXACT.check(again["value_head.final_layernorm.weight"], again["decoder.final_layernorm.weight"])
    assert not actor.logprobs(rollouts, REQUEST).values.any()


def test_other_programs_get_the_weights_of_the_policy_only(model, tmp_path):
    """A model that starts from a saved state with a value head has the policy's weights, and a new value head."""
    head, rollouts = SharedValueHead("mlp", 1), lab.make_rollouts()
    actor = single(model("qwen2"), head)
    assert lab.weights_of(actor).keys() == lab.weights_of(lab.actor(model("qwen2"))).keys()
    saved(actor, tmp_path / "state")
    next_actor = lab.started(replace(actor.settings, model=str(tmp_path / "state")))
    lab.check_all(EXACT, lab.weights_of(next_actor), lab.weights_of(actor))
    assert not next_actor.logprobs(rollouts, REQUEST).values.any()


def test_state_of_another_head_is_refused(model, tmp_path):
    actor = single(model("qwen2"), SharedValueHead("mlp", 1))
    saved(actor, tmp_path / "state")
    for other in (None, SharedValueHead("linear", 1), SharedValueHead("mlp")):
        with pytest.raises(StorageError, match="cannot be read"):
            lab.unstarted(replace(actor.settings, value_head=other)).load(tmp_path / "state")


def test_copied_layers_above_a_frozen_trunk_get_their_gradient(model):
    """The gradient equals that of a model in which all layers train, with and without recomputation."""
    rollouts = lab.make_rollouts()
    objective, found = joint_objective(rollouts), []
    base = replace(settings(model("qwen2"), "actor", ParallelTable()), value_head=SharedValueHead("linear", 2))
    for trainable, recompute in ((Trainable(), "none"), (Trainable(top_layers=1), "none"), (Trainable(1), "full")):
        actor = lab.started(replace(base, trainable=trainable, recompute=recompute))
        [stage] = lab.rank_of(actor).models
        with torch.no_grad():
            weight = stage.value_head.output_layer.weight
            weight.copy_(torch.sin(torch.arange(weight.numel())).view_as(weight))
        actor.update(rollouts, [all_rows(rollouts, objective, LOOK)], objective)
        trained = {name: each for name, each in stage.named_parameters() if each.requires_grad}
        found.append({name: each.main_grad.clone() for name, each in trained.items()})
    assert "decoder.layers.0.mlp.linear_fc1.weight" in found[0].keys() - found[1].keys()
    assert "value_head.layers.0.mlp.linear_fc1.weight" in found[1]
    for part in found[1:]:
        lab.check_all(lab.GRADIENT, part, {name: found[0][name] for name in part})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["EP2", "TP2 sequence"])
def test_copied_layers_with_experts_do_not_depend_on_the_layout(pool, model, tmp_path, layout):
    """One sequence for two data ranks: a rank without rows takes part in the exchange of tokens of all layers."""
    head, rollouts = SharedValueHead("linear", 1), lab.make_rollouts(prompts=(3,), lengths=(9,))
    objective = joint_objective(rollouts)
    moments = []
    for name in ("alone", layout):
        actor = started_actor(pool, settings_of(model, "qwen3-moe", name, value_head=head))
        actor.update(rollouts, [all_rows(rollouts, objective, step) for step in (MOVE, LOOK)], objective)
        state = saved(actor, tmp_path / name)
        keys = [key for key in state.tensors if "exp_avg." in key]
        moments.append({key.partition("exp_avg.")[2]: state.read(key).float() for key in keys})
    assert any("value_head.layers.0.mlp.experts" in name for name in moments[0])
    assert gap(moments[1], moments[0]) < 1e-4
