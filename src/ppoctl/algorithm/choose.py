"""Choice of the step function for each step of a recipe, and questions about all steps of a run.

This is the only module that knows every step function. Each question about a run is answered for each range of steps
with the same step function, because a run may have a million steps.
"""

from collections.abc import Callable
from functools import cache

from ppoctl import metric_registry
from ppoctl.algorithm.pf_ppo import PF_CRITIC_ONLY, PF_STEP_FUNCTIONS, pf_ppo
from ppoctl.algorithm.policy_only import POLICY_ONLY, POLICY_ONLY_CORRECTED
from ppoctl.algorithm.ppo import CRITIC_ONLY, PPO, PPO_CORRECTED
from ppoctl.algorithm.stage_spec import ReportedMetric
from ppoctl.algorithm.trace import StepFunction, Trace, trace
from ppoctl.recipe.schema import NoResampling, Recipe
from ppoctl.store.outline import Outlines

StepFunctionAt = Callable[[Recipe, int], StepFunction]
"""(recipe, step) -> the step function of that step."""


def step_function_at(recipe: Recipe, step: int) -> StepFunction:
    """Return the step function of a step: without a critic if the advantages train none; otherwise the critic alone
    for the first `critic_only_steps`, then PPO. With a critic, rows may be sampled again (PF-PPO)."""
    corrects, resample = recipe.ppo.corrects_rollouts, recipe.ppo.resample
    if not recipe.ppo.advantages.trains_critic:
        return POLICY_ONLY_CORRECTED if corrects else POLICY_ONLY
    is_critic_only = step <= recipe.ppo.critic_only_steps
    if not isinstance(resample, NoResampling):
        return PF_CRITIC_ONLY if is_critic_only else pf_ppo(resample.order, corrects=corrects)
    if is_critic_only:
        return CRITIC_ONLY
    return PPO_CORRECTED if corrects else PPO


def changes_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the steps at which `step_function_at` may return another step function than at the step before."""
    return 1, recipe.ppo.critic_only_steps + 1


ALL_STEP_FUNCTIONS = (PPO, PPO_CORRECTED, CRITIC_ONLY, POLICY_ONLY, POLICY_ONLY_CORRECTED, *PF_STEP_FUNCTIONS)

_trace = cache(trace)


def trace_at(recipe: Recipe, step: int, choose: StepFunctionAt = step_function_at) -> Trace:
    """Return the trace of one step."""
    return _trace(choose(recipe, step))


def traces(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> dict[range, Trace]:
    """Return the traces of all steps of a run, by the range of consecutive steps that have the trace."""
    functions: dict[int, StepFunction] = {}
    last = ""
    for step in changes_of(recipe) if choose is step_function_at else range(1, recipe.steps + 1):
        function = choose(recipe, step)
        if step <= recipe.steps and function.name != last:
            functions[step], last = function, function.name
    ends = [*list(functions)[1:], recipe.steps + 1]
    return {range(start, end): _trace(functions[start]) for start, end in zip(functions, ends, strict=True)}


def outlines(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> Outlines:
    """Return the outlines of all steps of a run."""
    return Outlines({steps.start: found.outline for steps, found in traces(recipe, choose).items()})


def reported_at(recipe: Recipe, name: str) -> list[range]:
    """Return the steps at which a stage reports the metric."""
    return [
        steps for steps, found in traces(recipe).items() if any(each.reports(recipe, name) for each in found.stages)
    ]


def updated_role(recipe: Recipe, name: str) -> str | None:
    """Return the role whose update reports the metric; None: another stage, or no stage, reports the metric."""
    for found in traces(recipe).values():
        for stage in found.stages:
            if stage.reports(recipe, name) and (role := found.outline[stage.name].trains) is not None:
                return role
    return None


def missing(recipe: Recipe, name: str) -> ReportedMetric | None:
    """Return what the recipe lacks for a metric of a stage; None: some step reports the metric, or no stage of any
    step function has it."""
    if reported_at(recipe, name):
        return None
    own = [stage for found in traces(recipe).values() for stage in found.stages]
    others = [stage for function in ALL_STEP_FUNCTIONS for stage in _trace(function).stages if stage not in own]
    for stage in (*own, *others):
        for each in stage.metrics(recipe):
            if name in (each.metric.name, f"time/{stage.name}_s") and each.needs:
                return each
    metric = metric_registry.find(name)
    stage_name = next((stage.name for stage in others if stage.reports(recipe, name)), None)
    if metric is None or stage_name is None:
        return None
    needs = f"belongs to the stage `{stage_name}`, which no step of this recipe runs"
    return ReportedMetric(metric, is_on=False, needs=needs, keys=(_ADVANTAGES,))


_ADVANTAGES = ("ppo", "advantages", "kind")
