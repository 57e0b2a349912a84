"""The full KL from the reference, and filtered log-probs, do not depend on how ranks split model and tokens."""

from dataclasses import dataclass, replace
from functools import cache

import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, LAYOUTS, STEP, actor_of, gap, settings, started_actor
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.trainer import MegatronActor

pytestmark = pytest.mark.engines

NAMES = ("TP2", "PP2", "CP2", "TP2 sequence", "PP2 interleaved", "CP2 TP2", "DP2")
WHOLE = OutputRequest(temperature=0.8, entropy=True, full_kl=True)
FILTERED = replace(WHOLE, top_p=0.9, top_k=40, min_p=0.002, min_new_tokens=3, stop_token_ids=(7, 90))


@dataclass(frozen=True)
class Everything:
    """A loss that depends on all outputs."""

    weights: Tensor
    needs_entropy: bool = True

    def __call__(self, outputs: LossInputs, mask: Tensor) -> Tensor:
        assert outputs.entropy is not None
        assert outputs.full_kl is not None
        losses = outputs.full_kl - 0.2 * outputs.entropy - outputs.primary * self.weights[outputs.rows]
        return torch.where(mask, losses, 0.0)


def outputs_of(pool, actor: MegatronActor, output_request: OutputRequest):
    """Return an actor's outputs, computed without gradient and in an update, and the gradient of all of them."""
    rollouts = lab.make_rollouts()
    said = actor.logprobs(rollouts, output_request)
    objective = Terms((Term(Everything(lab.random_weights(rollouts)), rollouts.mask),), output_request)
    [result] = actor.update(rollouts, [lab.minibatch(rollouts, step=STEP)], objective)
    for one, other in zip(vars(said).values(), vars(result.outputs).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    return said, pool.gradients()


REQUESTS = {"whole": WHOLE, "filtered": FILTERED}


@pytest.fixture(scope="module")
def alone(pool, model, tmp_path_factory):
    """Return a model, the state of an actor that differs from its reference, and what one process computes."""
    root, rollouts = tmp_path_factory.mktemp("alone"), lab.make_rollouts()
    folder = lab.with_ends(model("qwen2-deep"), root / "model", (5, 33))
    actor = started_actor(pool, settings(folder, "actor", LAYOUTS["alone"]))
    actor.update(rollouts, [lab.minibatch(rollouts, step=STEP)], lab.policy_objective(rollouts))
    (root / "state").mkdir()
    lab.save(actor, root / "state")

    @cache
    def computed(name: str):
        actor = actor_of(pool, settings(folder, "actor", LAYOUTS["alone"]))
        actor.load(root / "state")
        return outputs_of(pool, actor, REQUESTS[name])

    return folder, root / "state", computed


@pytest.mark.sampled(2, 3)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("name", REQUESTS)
def test_full_kl_and_gradient_do_not_depend_on_layout(pool, alone, layout, name):
    folder, state, computed = alone
    expected, of_one = computed(name)
    actor = actor_of(pool, settings(folder, "actor", LAYOUTS[layout]))
    actor.load(state)
    said, gradient = outputs_of(pool, actor, REQUESTS[name])
    assert float(expected.full_kl.max()) > 0.01
    for one, other in zip(vars(said).values(), vars(expected).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert gap(gradient, of_one) < GRADIENT_GAP


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", NAMES)
def test_full_kl_from_another_reference_is_that_of_transformers(pool, model, tmp_path, layout):
    base, rollouts = model("qwen2-deep"), lab.make_rollouts()
    other = lab.with_scaled_weights(base, tmp_path / "other")
    actor = started_actor(pool, replace(settings(base, "actor", LAYOUTS[layout]), reference=str(other)))
    found = actor.logprobs(rollouts, WHOLE).full_kl
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (base, other)]
    expected = torch.zeros(rollouts.tokens.shape)
    for row, sequence in enumerate(rollouts.unpadded()):
        place = slice(int(rollouts.prompt_lengths[row]) - 1, len(sequence) - 1)
        with torch.no_grad():
            logits = [each(input_ids=sequence[None]).logits[0, place] / WHOLE.temperature for each in models]
        log_p, log_q = (each.log_softmax(-1) for each in logits)
        expected[row, : len(log_p)] = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    assert float(expected[rollouts.mask].min()) > 0.001
