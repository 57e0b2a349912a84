"""Data that MLflow receives in addition to the journal: results of `[expect]`, samples, the report, and GPU load."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ppoctl.core.batch.episodes import Episode
from ppoctl.core.errors import PpoctlError
from ppoctl.core.machine import nvml
from ppoctl.data.token_text import TokenText
from ppoctl.recipe.schema import Expectation
from ppoctl.show.report.expectations import ExpectationResult, check_expectations
from ppoctl.show.tracking.mirror import MirrorHooks
from ppoctl.show.tracking.mlflow_payloads import metric_name
from ppoctl.store.liveness import ended_early
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import StepRecords

REPORT = "report.html"
SAMPLES_PER_STEP = 8
"""Samples of each training step that are sent to MLflow; all samples remain in the run directory."""
STEPS_WITH_SAMPLES = 3
"""Number of steps with samples in the report, as in `ppoctl report`."""


def around(paths: RunPaths, notify: Callable[[str], None]) -> MirrorHooks:
    """Return the hooks of this run's MLflow mirror. The mirror calls each hook when it requires the data."""
    return MirrorHooks(
        notify=notify,
        contract=lambda: contract_of(paths),
        files=lambda: {REPORT: _report(paths)},
        samples=lambda step: trained_on(paths, step),
        gpus=gpus_here,
    )


def trained_on(paths: RunPaths, step: int) -> Sequence[dict[str, Any]]:
    """Return a few samples of a step, evenly spaced; empty if the records of the step are missing or damaged. A
    resume reports such records."""
    try:
        run = RecordedRun(paths)
        records = StepRecords.read(run, step, per_token=False)
    except (PpoctlError, OSError):  # retention may delete the records meanwhile
        return ()
    text = _text_of(run.recipe["model"]["path"])
    count = min(SAMPLES_PER_STEP, records.num_seqs)
    rows = [number * records.num_seqs // count for number in range(count)]
    return [
        {
            "step": step,
            "prompt": None if text is None else text.text(records.prompt_tokens(row)),
            "response": sample.response,
            "reward": sample.score,
            "finish": sample.finish,
            "mean advantage": sample.advantage,
            **({} if sample.turns is None else Episode.from_json(records.rollouts.value("episodes", row)).columns),
        }
        for row, sample in ((row, records.row(row)) for row in rows)
    ]


@cache
def _text_of(model: str) -> TokenText | None:
    """Return the tokenizer of a model; None if it is missing. Reading a large vocabulary takes seconds."""
    try:
        return TokenText(model)
    except PpoctlError:
        return None


def contract_of(paths: RunPaths) -> dict[str, str]:
    """Return a tag for each expectation that states whether the run meets it, and a tag for all expectations
    together.

    The mapping is empty if the recipe has no expectations, or if the run has not ended.
    """
    run = RecordedRun(paths)
    recipe, lines = run.recipe, run.lines
    done = max((line["step"] for line in lines if "stage" in line), default=0)
    if done < recipe["steps"] and ended_early(lines) is None:
        return {}  # `ppoctl rollout` and a save also end without an error
    expect = recipe.get("expect") or {}
    wanted = {metric: Expectation.model_validate(bounds) for metric, bounds in expect.items()}
    results = check_expectations(wanted, lines)
    if not results:
        return {}
    tags = {f"ppoctl.contract.{metric_name(result.metric)}": _tag_value(result) for result in results}
    return {"ppoctl.contract": _met_or_unmet(*results), **tags}


def gpus_here() -> dict[str, float]:
    """Return the load of this machine's GPUs, by the suffix of MLflow's metric names; unknown values are left out."""
    return {
        f"gpu_{load.index}_{name}": value
        for load in nvml.loads()
        for name, value in (
            ("utilization_percentage", load.busy_percent),
            ("memory_usage_megabytes", None if load.used_bytes is None else load.used_bytes / 1e6),
        )
        if value is not None
    }


def _report(paths: RunPaths) -> str:
    from ppoctl.show.report.report_file import report_text

    return report_text(paths.root, steps=STEPS_WITH_SAMPLES)


def _tag_value(result: ExpectationResult) -> str:
    value = "absent" if result.value is None else f"{result.value:.4g}"
    return f"{value} ({result.bound}): {_met_or_unmet(result)}"


def _met_or_unmet(*results: ExpectationResult) -> str:
    return "met" if all(result.met for result in results) else "unmet"
