"""Choice of the step function for each step of a recipe, and questions about all steps of a run.

This is the only module that knows every step function. Each question about a run is answered for each range of steps
with the same step function, because a run may have a million steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product, starmap

from ppoctl.algorithms.dynamic_sampling import KeptGroups, critic_sees_all
from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.get_samples import ONE_ROUND, EndedGroups, GetSamples, StepsAhead
from ppoctl.algorithms.joint import joint
from ppoctl.algorithms.pf_ppo import ORDERS, PF_CRITIC_ONLY, pf_ppo
from ppoctl.algorithms.policy_only import policy_only
from ppoctl.algorithms.ppo import CRITIC_ONLY, critic_only, ppo
from ppoctl.algorithms.remax_step import REMAX, REMAX_CORRECTED
from ppoctl.algorithms.sizes import segments_per_response
from ppoctl.algorithms.stage_spec import ReportedMetric
from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.algorithms.trace import StepFunction, Trace, trace
from ppoctl.core import metric_registry
from ppoctl.store.outline import Outlines

StepFunctionAt = Callable[[StepRecipe, int], StepFunction]
"""(recipe, step) -> the step function of that step."""


@dataclass(frozen=True)
class _Deciding:
    """Settings that decide the step function of a step."""

    corrects: bool
    """Whether rollouts are corrected."""
    max_rounds: int | None
    """Maximum number of rounds of dynamic sampling; None: there is one round."""
    critic_sees_all: bool
    """Whether the critic also trains on rows that dynamic sampling drops."""
    resamples: str | None
    """When rows are sampled again (PF-PPO); None: never."""
    reads_baselines: bool
    """Whether the advantages read greedy responses."""
    trains_critic: bool
    is_joint: bool
    """Whether the critic is a value head on the actor's model."""
    is_critic_only: bool
    """Whether only the critic trains in this step."""
    ahead: int
    """Number of steps by which a step generates the responses of a later step; 0: it generates its own."""
    is_first: bool
    """Whether no step before has generated responses for this one."""
    segments: int
    """Maximum number of steps that generate a response."""
    overlaps: bool = False
    """Whether rounds of dynamic sampling overlap, which changes neither the stages nor the name."""


def _facts_of(recipe: StepRecipe, step: int) -> _Deciding:
    ppo, groups = recipe.ppo, recipe.rollout.groups
    return _Deciding(
        corrects=ppo.corrects_rollouts,
        max_rounds=None if groups is None else groups.max_rounds,
        critic_sees_all=groups is not None and groups.critic_sees == "all",
        resamples=None if isinstance(ppo.resample, NoResampling) else ppo.resample.order,
        reads_baselines=ppo.advantages.reads_baselines,
        trains_critic=ppo.advantages.trains_critic,
        is_joint=recipe.value_head is not None,
        is_critic_only=step <= ppo.critic_only_steps,
        ahead=recipe.rollout.ahead,
        is_first=step <= max(1, recipe.rollout.ahead),
        segments=segments_per_response(recipe),
        overlaps=groups is not None and groups.overlap_rounds,
    )


def step_function_at(recipe: StepRecipe, step: int) -> StepFunction:
    """Return the step function of a step."""
    return _chosen(_facts_of(recipe, step))


def _chosen(facts: _Deciding) -> StepFunction:
    """Return a step function: with greedy responses if the advantages read them; without a critic if the advantages
    train none; with a joint update if the critic is a value head on the actor's model; otherwise the critic alone for
    the first `critic_only_steps`, then PPO. Dynamic sampling decides how the step gets its samples; with a critic,
    its rows may be sampled again (PF-PPO)."""
    corrects = facts.corrects
    kept = None
    if facts.max_rounds is not None:
        kept = KeptGroups(facts.max_rounds, facts.ahead > 0, facts.is_first, facts.overlaps)
    get_samples: GetSamples = ONE_ROUND if kept is None else kept
    if facts.segments > 1:
        get_samples = EndedGroups(facts.segments, facts.is_first, facts.ahead > 0)
    elif facts.ahead and kept is None:
        get_samples = StepsAhead(facts.ahead, facts.is_first)
    if facts.reads_baselines:
        return REMAX_CORRECTED if corrects else REMAX
    if not facts.trains_critic:
        return policy_only(get_samples, corrects=corrects)
    if facts.is_joint:
        return joint(get_samples, corrects=corrects)
    if facts.resamples is not None:
        return PF_CRITIC_ONLY if facts.is_critic_only else pf_ppo(facts.resamples, corrects=corrects)
    if kept is not None and facts.critic_sees_all:
        return CRITIC_ONLY if facts.is_critic_only else critic_sees_all(kept, corrects=corrects)
    return critic_only(get_samples) if facts.is_critic_only else ppo(get_samples, corrects=corrects)


@cache
def all_step_functions() -> tuple[StepFunction, ...]:
    """Return every step function that a recipe may have, of dynamic sampling those with one round."""
    flags, orders = (False, True), (None, *ORDERS)
    yes_first = (True, False)
    facts = starmap(
        _Deciding,
        product(flags, (None, 1), flags, orders, flags, yes_first, flags, flags, range(3), yes_first, (1, 2)),
    )
    return tuple({function.name: function for function in map(_chosen, facts)}.values())


def changes_of(recipe: StepRecipe) -> tuple[int, ...]:
    """Return the steps at which `step_function_at` may return another step function than at the step before."""
    ahead, segments = recipe.rollout.ahead, segments_per_response(recipe)
    first_reader = [max(1, ahead) + 1] if ahead or segments > 1 else []
    return tuple(sorted({1, recipe.ppo.critic_only_steps + 1, *first_reader}))


_trace = cache(trace)


def trace_at(recipe: StepRecipe, step: int, choose: StepFunctionAt = step_function_at) -> Trace:
    """Return the trace of one step."""
    return _trace(choose(recipe, step))


def traces(recipe: StepRecipe, choose: StepFunctionAt = step_function_at) -> dict[range, Trace]:
    """Return the traces of all steps of a run, by the range of consecutive steps that have the trace."""
    functions: dict[int, StepFunction] = {}
    last = ""
    for step in changes_of(recipe) if choose is step_function_at else range(1, recipe.steps + 1):
        function = choose(recipe, step)
        if step <= recipe.steps and function.name != last:
            functions[step], last = function, function.name
    ends = [*list(functions)[1:], recipe.steps + 1]
    return {range(start, end): _trace(functions[start]) for start, end in zip(functions, ends, strict=True)}


def outlines(recipe: StepRecipe, choose: StepFunctionAt = step_function_at) -> Outlines:
    """Return the outlines of all steps of a run, and of later steps, if they read records of this run when it is
    continued."""
    found = {steps.start: traced.outline for steps, traced in traces(recipe, choose).items()}
    later = [step for step in changes_of(recipe) if step > recipe.steps and choose is step_function_at]
    beyond = {step: trace_at(recipe, step).outline for step in later}
    return Outlines(found | {step: outline for step, outline in beyond.items() if outline.reaches_back})


def generating_stages(recipe: StepRecipe) -> frozenset[str]:
    """Return the names of the stages that generate samples. They keep finished samples, and may stop between two
    samples."""
    stages = [EVALUATION, *(stage for found in traces(recipe).values() for stage in found.stages)]
    return frozenset(stage.name for stage in stages if any(each.kind == "generate" for each in stage.passes(recipe)))


def reported_at(recipe: StepRecipe, name: str) -> list[range]:
    """Return the steps at which a stage certainly reports the metric."""
    certain = []
    for steps, found in traces(recipe).items():
        first = [each.reports_from(recipe) for each in found.stages if each.reports(recipe, name)]
        if first and (reported := range(max(steps.start, min(first)), steps.stop)):
            certain.append(reported)
    return certain


def trained_at(recipe: StepRecipe, role: str) -> list[range]:
    """Return the steps that train the role."""
    return [steps for steps, found in traces(recipe).items() if found.outline.training(role) is not None]


def updated_role(recipe: StepRecipe, name: str) -> str | None:
    """Return the role whose update reports the metric; None: another stage, or no stage, reports the metric."""
    for found in traces(recipe).values():
        for stage in found.stages:
            if stage.reports(recipe, name) and (role := found.outline[stage.name].trains) is not None:
                return role
    return None


def missing(recipe: StepRecipe, name: str) -> ReportedMetric | None:
    """Return what the recipe lacks for a metric of a stage; None: some step reports the metric, or no stage of any
    step function has it."""
    if reported_at(recipe, name):
        return None
    own = [stage for found in traces(recipe).values() for stage in found.stages]
    others = [stage for function in all_step_functions() for stage in _trace(function).stages if stage not in own]
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
