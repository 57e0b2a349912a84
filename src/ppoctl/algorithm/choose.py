"""Choice of the step function for each step of a recipe, and questions about all steps of a run.

This is the only module that knows every step function. Each question about a run is answered for each range of steps
with the same step function, because a run may have a million steps.
"""

from collections.abc import Callable
from functools import cache

from ppoctl import metric_registry
from ppoctl.algorithm.dynamic_sampling import KeptGroups, critic_sees_all
from ppoctl.algorithm.joint import JOINT, JOINT_CORRECTED, joint
from ppoctl.algorithm.pf_ppo import PF_CRITIC_ONLY, PF_STEP_FUNCTIONS, pf_ppo
from ppoctl.algorithm.policy_only import POLICY_ONLY, POLICY_ONLY_CORRECTED, policy_only
from ppoctl.algorithm.ppo import CRITIC_ONLY, PPO, PPO_CORRECTED, critic_only, ppo
from ppoctl.algorithm.remax import REMAX, REMAX_CORRECTED
from ppoctl.algorithm.samples import ONE_ROUND
from ppoctl.algorithm.stage_spec import ReportedMetric
from ppoctl.algorithm.trace import StepFunction, Trace, trace
from ppoctl.recipe.schema import NoResampling, Recipe
from ppoctl.store.outline import Outlines

StepFunctionAt = Callable[[Recipe, int], StepFunction]
"""(recipe, step) -> the step function of that step."""


def step_function_at(recipe: Recipe, step: int) -> StepFunction:
    """Return the step function of a step: with greedy responses if the advantages read them; without a critic if the
    advantages train none; with a joint update if the critic is a value head on the actor's model; otherwise the
    critic alone for the first `critic_only_steps`, then PPO. Dynamic sampling decides how the step gets its samples;
    with a critic, its rows may be sampled again (PF-PPO)."""
    corrects, groups, resample = recipe.ppo.corrects_rollouts, recipe.rollout.groups, recipe.ppo.resample
    is_critic_only = step <= recipe.ppo.critic_only_steps
    get_samples = ONE_ROUND if groups is None else KeptGroups(groups.max_rounds)
    if recipe.ppo.advantages.reads_baselines:
        return REMAX_CORRECTED if corrects else REMAX
    if not recipe.ppo.advantages.trains_critic:
        return policy_only(get_samples, corrects=corrects)
    if recipe.value_head is not None:
        return joint(get_samples, corrects=corrects)
    if not isinstance(resample, NoResampling):
        return PF_CRITIC_ONLY if is_critic_only else pf_ppo(resample.order, corrects=corrects)
    if groups is not None and groups.critic_sees == "all":
        return CRITIC_ONLY if is_critic_only else critic_sees_all(KeptGroups(groups.max_rounds), corrects=corrects)
    return critic_only(get_samples) if is_critic_only else ppo(get_samples, corrects=corrects)


def changes_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the steps at which `step_function_at` may return another step function than at the step before."""
    return 1, recipe.ppo.critic_only_steps + 1


ALL_STEP_FUNCTIONS = (
    *(PPO, PPO_CORRECTED, CRITIC_ONLY, POLICY_ONLY, POLICY_ONLY_CORRECTED, REMAX, REMAX_CORRECTED),
    *(JOINT, JOINT_CORRECTED),
    critic_sees_all(KeptGroups(1)),
    *PF_STEP_FUNCTIONS,
)

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
    """Return the steps at which a stage certainly reports the metric."""
    certain = []
    for steps, found in traces(recipe).items():
        first = [each.reports_from(recipe) for each in found.stages if each.reports(recipe, name)]
        if first and (reported := range(max(steps.start, min(first)), steps.stop)):
            certain.append(reported)
    return certain


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
    metric = metric_registry.find(name)
    for stage in (*own, *others):
        for each in stage.metrics(recipe):
            if (each.metric is metric or name == f"time/{stage.name}_s") and each.needs:
                return each
    stage_name = next((stage.name for stage in others if stage.reports(recipe, name)), None)
    if metric is None or stage_name is None:
        return None
    needs = f"belongs to the stage `{stage_name}`, which no step of this recipe runs"
    return ReportedMetric(metric, is_on=False, needs=needs, keys=(_ADVANTAGES,))


_ADVANTAGES = ("ppo", "advantages", "kind")
