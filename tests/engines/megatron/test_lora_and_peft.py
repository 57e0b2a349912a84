"""A model with adapters computes what peft computes: outputs, the gradient of a first update, and the update.

The matrices are random, so that both have a gradient. peft's model is in float64.
"""

from dataclasses import replace

import layout_lab
import lora_lab
import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, gap
from lora_lab import adapted, parameters_of, peft_model, set_matrices, started, started_actor
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from ppoctl.algorithms.stages.objective import Terms
from ppoctl.core.ports import OutputRequest, TokenOutputs
from ppoctl.engines.megatron.parameter_shards import parts_of
from ppoctl.models.lora import Lora
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

pytestmark = pytest.mark.engines

TARGETS: dict[str, tuple[str, ...]] = {
    "qwen2": (),
    "qwen2-tied": ("q_proj", "v_proj", "up_proj"),
    "qwen3": (),
    "llama": ("k_proj", "o_proj", "gate_proj"),
    "mistral": ("q_proj", "k_proj", "down_proj"),
    "gemma2": (),
    "gemma3": (),
    "qwen2-moe": (),
    "qwen2-moe-mixed": ("v_proj", "gate_proj", "down_proj"),
    "qwen3-moe": (),
    "qwen3-moe-mixed": ("up_proj", "down_proj"),
    "deepseek-v3": (),
    "deepseek-v3-low-rank": (),
}
"""Model -> projections with adapters; none named: all."""
REQUEST = OutputRequest(temperature=0.8, entropy=True)
STEP = replace(layout_lab.STEP, eps=1e-3)
"""Adam does not amplify gradients near 0."""


def lora_of(trainable: Trainable) -> Lora:
    assert trainable.lora is not None
    return trainable.lora


def clipped_gradient(
    objective: Terms, outputs: TokenOutputs, trained: dict[str, torch.nn.Parameter]
) -> tuple[float, dict[str, Tensor]]:
    """Return the norm of the gradient of the objective, and the gradient after clipping."""
    every = torch.arange(len(outputs.primary))
    objective(every, outputs, objective.totals(every)).backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), STEP.grad_clip)
    return float(norm), {name: each.grad for name, each in trained.items() if each.grad is not None}


def take_step(trained: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Take the step of torch's AdamW, and return the parameters."""
    betas = (STEP.beta1, STEP.beta2)
    torch.optim.AdamW(trained.values(), STEP.lr, betas, STEP.eps, STEP.weight_decay).step()
    return {name: each.detach() for name, each in trained.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", TARGETS)
def test_outputs_first_gradient_and_update_are_those_of_peft(model, kind):
    trainable, rollouts = adapted(*TARGETS[kind]), lab.make_rollouts()
    objective = lab.policy_objective(rollouts, needs_entropy=True, temperature=0.8)
    actor = started_actor(model(kind), trainable)
    matrices = set_matrices(actor)
    said = actor.logprobs(rollouts, REQUEST)
    [result] = actor.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)

    judge = peft_model(lab.hugging_face_model(kind), lora_of(trainable), matrices)
    outputs, trained = lab.token_outputs(judge, rollouts, 0.8), lora_lab.matrices_in(judge)
    plain, _ = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, 0.8)
    assert float((outputs.primary.detach() - plain)[rollouts.mask].abs().max()) > 0.1
    for found in (said, result.outputs):
        FLOAT32.check(found.primary, outputs.primary)
        FLOAT32.check(found.entropy, outputs.entropy)
    norm, gradient = clipped_gradient(objective, outputs, trained)
    assert norm > STEP.grad_clip
    assert abs(result.grad_norm / norm - 1) < GRADIENT_GAP
    found_gradient = {name: each.main_grad for name, each in parameters_of(actor).items()}
    lab.check_all(lab.GRADIENT, found_gradient, gradient)
    assert gap(found_gradient, gradient) < GRADIENT_GAP
    lab.check_all(FLOAT32, dict(parameters_of(actor)), take_step(trained))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "qwen3"])
def test_critic_with_adapters_and_whole_value_head_is_that_of_peft(model, kind):
    """The head is not an adapter: it is saved by peft in full (`modules_to_save`)."""
    trainable, rollouts = adapted("q_proj", "down_proj"), lab.make_rollouts()
    objective, critic = lab.value_objective(rollouts), started(model(kind), trainable, "critic")
    matrices = set_matrices(critic)
    [stage] = lab.rank_of(critic).models
    head = stage.output_layer.weight
    head.data.copy_(torch.sin(torch.arange(head.numel())).view_as(head))
    values = critic.values(rollouts)  # type: ignore[attr-defined]
    whole = AutoModelForSequenceClassification.from_pretrained(model(kind), num_labels=1, **lab.EAGER)
    whole.score.weight.data.copy_(head.data)
    judge = peft_model(whole, lora_of(trainable), matrices, task_type="SEQ_CLS", modules_to_save=["score"])
    [result] = critic.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)

    below, score = judge.base_model.model.model, judge.base_model.model.score
    expected = torch.zeros(rollouts.tokens.shape, dtype=torch.float64)
    for row, sequence in enumerate(rollouts.unpadded()):
        prompt, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
        hidden = below(input_ids=sequence[None]).last_hidden_state
        expected[row, :length] = score(hidden)[0, prompt - 1 : prompt + length - 1, 0]
    FLOAT32.check(values, expected)
    own = {**parameters_of(critic), "score.weight": head}
    trained = {**lora_lab.matrices_in(judge), "score.weight": score.modules_to_save["default"].weight}
    norm, gradient = clipped_gradient(objective, TokenOutputs(expected), trained)
    assert abs(result.grad_norm / norm - 1) < GRADIENT_GAP
    found = {name: each.main_grad for name, each in own.items()}
    lab.check_all(lab.GRADIENT, found, gradient)
    assert gap(found, gradient) < GRADIENT_GAP
    lab.check_all(FLOAT32, dict(own), take_step(trained))


LAYER = "model.layers.1."
PROJECTIONS = {
    "q_proj": "self_attn.q_proj", "k_proj": "self_attn.k_proj", "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj", "gate_proj": "mlp.gate_proj", "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_adapter_of_full_rank_takes_the_step_of_full_training(model, projection):
    """The larger matrix is 0 and the square one, Q, is orthogonal. If the weight W has the gradient G, B has the
    gradient scale x G Q^T (A: scale x Q^T G), so a plain step of rate 0.1 / scale^2 changes the weight by -0.1 G."""
    rollouts, name = lab.make_rollouts(), f"{LAYER}{PROJECTIONS[projection]}.weight"
    objective, still = lab.policy_objective(rollouts), lab.minibatch(rollouts, step=replace(lab.STEP, lr=0.0))
    full = lab.actor(model("qwen2"))
    full.update(rollouts, [still], objective)
    gradient, weights = lab.gradients_of(full)[name], lab.weights_of(full)
    outputs, inputs = gradient.shape
    rank = min(outputs, inputs)
    trainable = adapted(projection, rank=rank, alpha=0.7 * rank, freeze=("decoder.layers.0.*",))
    actor, scale = started_actor(model("qwen2"), trainable), lora_of(trainable).scale
    a, b = parameters_of(actor).values()
    square, other = (a, b) if outputs >= inputs else (b, a)
    orthogonal = torch.linalg.qr(torch.randn(rank, rank, generator=torch.Generator().manual_seed(1))).Q
    with torch.no_grad():
        square.copy_(orthogonal)
        other.zero_()
    actor.update(rollouts, [still], objective)
    expected = scale * (gradient @ orthogonal.T if other is b else orthogonal.T @ gradient)
    lab.GRADIENT.check(other.main_grad, expected)
    with torch.no_grad():
        other.sub_(0.1 / scale**2 * other.main_grad)
    stepped = weights[name] - 0.1 * gradient
    assert float((0.1 * gradient).abs().max()) > 1e-3
    found = lab.weights_of(actor)
    FLOAT32.check(found.pop(name), stepped)
    lab.check_all(EXACT, found, {each: weight for each, weight in weights.items() if each != name})
    [stage] = lab.rank_of(full).models
    [part] = [part for part in parts_of(stage) if part.name == name]
    part.write(stepped, stage.pg_collection)
    FLOAT32.check(actor.logprobs(rollouts, REQUEST).primary, full.logprobs(rollouts, REQUEST).primary)


def test_initial_matrices_are_those_of_peft_and_depend_on_the_seed_alone(model):
    """peft's default is kaiming_uniform_ with a = sqrt(5), that is uniform in +-1 / sqrt(inputs); B is 0."""
    found: list[dict[str, Tensor]] = []
    for random_state, changes in ((1, {"seed": 5}), (2, {"seed": 5}), (3, {"seed": 6}), (4, {"role": "critic"})):
        torch.manual_seed(random_state)
        trained = lora_lab.started(model("qwen2"), adapted(rank=16), **changes)  # type: ignore[arg-type]
        found.append({name: each.detach().clone() for name, each in lora_lab.parameters_of(trained).items()})
    lab.check_all(EXACT, found[1], found[0])
    by_inputs: dict[int, list[Tensor]] = {}
    for name, matrix in found[0].items():
        if name.endswith("lora_B.weight"):
            assert not matrix.any()
            continue
        by_inputs.setdefault(matrix.shape[1], []).append(matrix.flatten())
        assert all(not torch.equal(matrix, other[name]) for other in found[2:])
    for inputs, drawn in by_inputs.items():
        bound, every = inputs**-0.5, torch.cat(drawn)
        assert 0.99 * bound < float(every.abs().max()) <= bound
        assert float(every.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
        assert abs(float(every.mean())) < 0.03 * bound
        assert len(every.unique()) > 0.99 * len(every)
    assert by_inputs.keys() == {48, 80}
