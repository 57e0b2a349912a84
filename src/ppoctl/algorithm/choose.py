"""Choice of the step function for each step of a recipe, and questions about all steps of a run.

This is the only module that knows every step function. Each question about a run is answered for each range of steps
with the same step function, because a run may have a million steps.
"""

from collections.abc import Callable, Iterator
from functools import cache

from ppoctl.algorithm.ppo import CRITIC_ONLY, PPO, PPO_CORRECTED
from ppoctl.algorithm.stage_spec import ReportedMetric, StageSpec
from ppoctl.algorithm.trace import StepFunction, Trace, trace
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outlines

StepFunctionAt = Callable[[Recipe, int], StepFunction]
"""(recipe, step) -> the step function of that step."""


def step_function_at(recipe: Recipe, step: int) -> StepFunction:
    """Return the step function of a step: for the first `critic_only_steps` the critic alone, then PPO with or
    without correction."""
    corrects = recipe.ppo.corrects_rollouts
    if step <= recipe.ppo.critic_only_steps:
        return CRITIC_ONLY
    return PPO_CORRECTED if corrects else PPO


ALL_STEP_FUNCTIONS = (PPO, PPO_CORRECTED, CRITIC_ONLY)

_trace = cache(trace)


def trace_at(recipe: Recipe, step: int, choose: StepFunctionAt = step_function_at) -> Trace:
    """Return the trace of one step."""
    return _trace(choose(recipe, step))


def traces(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> dict[range, Trace]:
    """Return the traces of all steps of a run, by the range of consecutive steps that have the trace."""
    starts: list[int] = []
    functions: list[StepFunction] = []
    for step in range(1, recipe.steps + 1):
        function = choose(recipe, step)
        if not functions or function.name != functions[-1].name:
            starts.append(step)
            functions.append(function)
    ends = [*starts[1:], recipe.steps + 1]
    return {range(*ends_of): _trace(each) for *ends_of, each in zip(starts, ends, functions, strict=True)}


def outlines(recipe: Recipe, choose: StepFunctionAt = step_function_at) -> Outlines:
    """Return the outlines of all steps of a run."""
    return Outlines({steps.start: found.outline for steps, found in traces(recipe, choose).items()})


def reported_at(recipe: Recipe, name: str) -> list[range]:
    """Return the steps at which a stage reports the metric."""
    return [steps for steps, found in traces(recipe).items() if any(_reports(found, recipe, name))]


def updated_role(recipe: Recipe, name: str) -> str | None:
    """Return the role whose update reports the metric; None: another stage, or no stage, reports the metric."""
    for found in traces(recipe).values():
        for stage in _reports(found, recipe, name):
            return found.outline[stage.name].trains
    return None


def missing(recipe: Recipe, name: str) -> ReportedMetric | None:
    """Return what the recipe lacks for a metric; None: some step reports the metric, or no stage of any algorithm
    has it."""
    if reported_at(recipe, name):
        return None
    specs = [stage for found in traces(recipe).values() for stage in found.stages]
    specs += [stage for function in ALL_STEP_FUNCTIONS for stage in _trace(function).stages]
    lacking = (each for stage in specs for each in stage.metrics(recipe) if each.metric.name == name)
    return next((each for each in lacking if each.needs), None)


def _reports(found: Trace, recipe: Recipe, name: str) -> Iterator[StageSpec[object]]:
    """Yield the stages that report the metric."""
    for stage in found.stages:
        if name == f"time/{stage.name}_s" or any(
            each.is_on and each.metric.name == name for each in stage.metrics(recipe)
        ):
            yield stage
