"""Loss totals are counted over the minibatch: gradients do not depend on microbatches or layout."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import megatron_lab as lab
import pytest
import torch
from layout_lab import GRADIENT_GAP, STEP, gap, set_microbatches, settings_of, started, started_actor

from ppoctl.algorithms.formulas.aggregation import AggregationKind, aggregation
from ppoctl.algorithms.formulas.policy_loss import Cispo, Gspo, Reinforce
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.stages.actor_update import Entropy, KlToReference, NegativeLogLikelihood, Surrogate
from ppoctl.algorithms.stages.logprobs import KlPenalty
from ppoctl.algorithms.stages.objective import Term, Terms
from ppoctl.algorithms.stages.python_loss import PythonLoss
from ppoctl.core.ports import Minibatch, OutputRequest
from ppoctl.core.user_functions import TrainingFunction, digest_of

KIND, LAYOUTS = "qwen2-deep", ("alone", "DP2", "TP2", "CP2")
ROWS = torch.tensor([3, 0, 4, 1])
CUTS = [BySequences(microbatch_seqs=4 // count) for count in (1, 2, 4)] + [ByTokens(max_tokens_per_microbatch=20)]
"""One, two and four microbatches, and a cap of tokens."""
REQUEST = OutputRequest(temperature=0.8)
USERS = Path(__file__).parents[2] / "stages" / "users_training.py"
KINDS = {
    "token_mean": PythonLoss(
        TrainingFunction("ppo.policy_loss", f"{USERS}:clip", {"high": 0.3}, digest_of(f"{USERS}:clip")),
        needs_entropy=False,
    ),
    "sequence_mean_token_mean": Gspo(low=0.2, high=0.3, gradient="sequence"),
    "sequence_mean_token_sum": Cispo(low=0.4, high=0.3),
    "fixed_length": Reinforce(),
}
"""Aggregation -> the kind of loss that it is tested with, so that each kind is tested."""
UNMOVED = replace(STEP, lr=0.0, weight_decay=0.0)


def objective(kind: AggregationKind, rollouts: lab.TrainerBatch, old: torch.Tensor) -> Terms:
    """Return the objective: the loss, an entropy bonus, KL to another policy, and the NLL of two responses. Row 0 is
    fully masked."""
    mask = rollouts.mask & (torch.arange(rollouts.num_seqs) != 0)[:, None]
    good = mask & torch.isin(torch.arange(rollouts.num_seqs), torch.tensor([3, 1]))[:, None]
    how = aggregation(kind, max_new_tokens=9)
    surrogate = Surrogate(old, lab.random_weights(rollouts), KINDS[kind], old)
    return Terms(
        (
            Term(surrogate, mask, aggregation=how),
            Term(Entropy(), mask, coef=-0.2, aggregation=how),
            Term(KlToReference(old - 0.5, old, KlPenalty("loss", "k3", coef=0.3)), mask, coef=0.3, aggregation=how),
            Term(NegativeLogLikelihood(), good, coef=0.1),
        ),
        REQUEST,
    )


def gradients_of(pool, model, layout, cuts, old):
    """Return the gradients of each aggregation and split, in the processes of one layout."""
    rollouts = lab.make_rollouts()
    trained = started(pool, settings_of(model, KIND, layout))
    found = {}
    for place, cut in enumerate(cuts):
        pool.examine(set_microbatches, cut)
        for kind in get_args(AggregationKind):
            policy_objective = objective(kind, rollouts, old)
            trained.update(rollouts, [Minibatch(ROWS, policy_objective.totals(ROWS), UNMOVED)], policy_objective)
            found[kind, place] = pool.gradients()
    return found


@pytest.fixture(scope="module")
def whole(pool, model):
    """Return old log-probs, close to those of the initial weights, and each aggregation's gradient without a
    split."""
    actor = started_actor(pool, settings_of(model, KIND, "alone"))
    rollouts = lab.make_rollouts()
    old = actor.logprobs(rollouts, REQUEST).primary + 0.2 * lab.random_weights(rollouts)
    found = gradients_of(pool, model, "alone", CUTS[:1], old)
    return old, {kind: gradient for (kind, _), gradient in found.items()}


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_aggregation_gradient_ignores_microbatches_and_layout(pool, model, whole, layout):
    old, expected = whole
    found = gradients_of(pool, model, layout, CUTS, old)
    assert len(found) == 4 * len(CUTS)
    for (kind, _), gradient in found.items():
        assert gap(gradient, expected[kind]) < GRADIENT_GAP
    # The aggregations differ from each other.
    assert gap(expected["sequence_mean_token_sum"], expected["fixed_length"]) > 0.1
