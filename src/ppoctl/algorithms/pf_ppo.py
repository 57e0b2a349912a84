"""PF-PPO (Zhang et al. 2024, arXiv:2409.06957): PPO whose updates train on rows that are sampled again by their
scores.

Values, log-probs, corrections and advantages are computed once, over all rows of the step. `RESAMPLE` then selects
rows, and `take` selects these rows of every record, so a row keeps its own tokens and numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar

from ppoctl.algorithms.advantages_spec import ADVANTAGES, AdvantagesSpec
from ppoctl.algorithms.forward_specs import CORRECTIONS, LOGPROBS, VALUES, Correct
from ppoctl.algorithms.get_samples import ONE_ROUND
from ppoctl.algorithms.stage_spec import ReportedMetric, StageParts, StageSpec
from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE
from ppoctl.core import metric_registry as metrics

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Advantages, Selection
    from ppoctl.store.stage_runner import Stage


@dataclass(frozen=True)
class ResampleSpec(StageSpec["Selection"]):
    """55-resample: rows that are sampled again by their shaped scores."""

    kind: ClassVar[str] = "selection"
    keys: ClassVar[tuple[str, ...]] = ("seed", "ppo.resample")
    defines_rows: ClassVar[bool] = True

    def metrics(self, recipe: StepRecipe) -> tuple[ReportedMetric, ...]:
        is_on = not isinstance(recipe.ppo.resample, NoResampling)
        needs, key = "requires `ppo.resample`, but rows are not sampled again", ("ppo", "resample", "kind")
        return (ReportedMetric(metrics.RESAMPLE_EFFECTIVE_SEQS, is_on, needs, (key,), "--set ppo.resample.kind=pow"),)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Selection]":
        from ppoctl.algorithms.stages.resample import ResampleStage

        table = recipe.ppo.resample
        assert not isinstance(table, NoResampling), "only step functions of PF-PPO sample rows again"
        return ResampleStage(table.weigh(), recipe.seed, self.fingerprint(recipe), self.name)


@dataclass(frozen=True)
class WhiteningSpec(StageSpec["Advantages"]):
    """56-whitening: the advantages of selected rows, whitened."""

    kind: ClassVar[str] = "advantages"

    def present_fields(self, recipe: StepRecipe) -> dict[str, bool]:
        return ADVANTAGES.present_fields(recipe)

    def build(self, recipe: StepRecipe, parts: StageParts) -> "Stage[Advantages]":
        from ppoctl.algorithms.stages.resample import WhiteningStage

        return WhiteningStage(self.fingerprint(recipe), self.name)


RESAMPLE = ResampleSpec("resample")
WHITENING = WhiteningSpec("whitening")
RAW_ADVANTAGES = AdvantagesSpec("advantages", whitens=False)
"""The advantages that `WHITENING` whitens."""


def _take_advantages(run_stage: RunStage, selection: "Selection", advantages: "Advantages") -> "Advantages":
    """Return the advantages of the selected rows, which are whitened already."""
    return run_stage.take(selection, [advantages])


def _whiten_advantages(run_stage: RunStage, selection: "Selection", advantages: "Advantages") -> "Advantages":
    """Return the advantages of the selected rows, and whiten them."""
    return run_stage(WHITENING, run_stage.take(selection, [advantages]))


@dataclass(frozen=True)
class ResampleOrder:
    """Order of resampling and whitening."""

    suffix: str
    """End of the names of step functions with this order."""
    advantages: AdvantagesSpec
    """Stage that computes the advantages of all rows."""
    take: "Callable[[RunStage, Selection, Advantages], Advantages]"
    """Function that returns the advantages of the selected rows."""


ORDERS = {
    "after_whitening": ResampleOrder("", ADVANTAGES, _take_advantages),
    "before_whitening": ResampleOrder("_whitened_last", RAW_ADVANTAGES, _whiten_advantages),
}
"""Value of `ppo.resample.order` -> the order."""


def _pf_ppo(run_stage: RunStage, inputs: StepInputs, order: ResampleOrder, correct: Correct) -> StepOutputs:
    """Generate, score, compute advantages, sample rows again, and update critic and actor, with or without rollout
    correction (see `ppo`)."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    samples = ONE_ROUND(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = correct(run_stage, rollouts, logprobs)
    advantages = run_stage(order.advantages, rollouts, rewards, values, logprobs, inputs.carry)
    selection = run_stage(RESAMPLE, rollouts, advantages)
    rows, taken = run_stage.take(selection, [rollouts]), order.take(run_stage, selection, advantages)
    critic = run_stage(CRITIC_UPDATE, critic, rows, run_stage.take(selection, [values]), taken)
    weights = [run_stage.take(selection, [each]) for each in correction]
    actor = run_stage(ACTOR_UPDATE, actor, rows, run_stage.take(selection, [logprobs]), taken, *weights)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, samples.generated)


def _critic_only(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """Run PF-PPO without the actor update. The critic reads no advantages, so their order does not matter."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    samples = ONE_ROUND(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    selection = run_stage(RESAMPLE, rollouts, advantages)
    rows, values = run_stage.take(selection, [rollouts]), run_stage.take(selection, [values])
    critic = run_stage(CRITIC_UPDATE, critic, rows, values, run_stage.take(selection, [advantages]))
    return StepOutputs({"critic": critic}, advantages.carry, samples.generated)


@cache
def pf_ppo(order: str, *, corrects: bool = False) -> StepFunction:
    """Return PF-PPO with a value of `ppo.resample.order`, with or without rollout correction."""
    name = "pf_ppo_corrected" if corrects else "pf_ppo"
    return StepFunction(
        name + ORDERS[order].suffix, partial(_pf_ppo, order=ORDERS[order], correct=CORRECTIONS[corrects])
    )


PF_CRITIC_ONLY = StepFunction("pf_critic_only", _critic_only)
