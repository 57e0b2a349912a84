"""What MLflow is told of a run beside its journal: how its contract is met, samples of training, its report, and how
busy the GPUs are."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ppoctl.data.token_text import TokenText
from ppoctl.errors import PpoctlError
from ppoctl.loop.expectations import ExpectationResult, check_expectations
from ppoctl.machine import nvml
from ppoctl.recipe.schema import Expectation
from ppoctl.store import run_dir
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.samples import StepRecords
from ppoctl.tracking.mirror_hooks import MirrorHooks
from ppoctl.tracking.mlflow_payloads import metric_name

REPORT = "report.html"
SAMPLES_PER_STEP = 8
"""Samples of each step of training that MLflow is sent; all of them stay in the run directory."""
STEPS_WITH_SAMPLES = 3
"""Steps of the report that have samples, as `ppoctl report` has them."""


def around(paths: RunPaths, notify: Callable[[str], None]) -> MirrorHooks:
    """What the mirror of this run is given; each is looked up when the mirror asks for it."""
    return MirrorHooks(
        notify=notify,
        contract=lambda: contract_of(paths),
        files=lambda: {REPORT: _report(paths)},
        samples=lambda step: trained_on(paths, step),
        gpus=gpus_here,
    )


def trained_on(paths: RunPaths, step: int) -> Sequence[dict[str, Any]]:
    """A few samples of a step, evenly over it; none where they are gone or damaged, which whoever resumes hears."""
    try:
        records = StepRecords.read(paths, step, per_token=False)
    except (PpoctlError, OSError):  # retention may remove it meanwhile
        return ()
    recipes = run_dir.recipes(paths)
    text, count = _text_of(recipes[max(recipes)]["model"]["path"]), min(SAMPLES_PER_STEP, records.num_seqs)
    rows = [number * records.num_seqs // count for number in range(count)]
    return [
        {
            "step": step,
            "prompt": None if text is None else text.text(records.prompt_tokens(row)),
            "response": told.response,
            "reward": told.score,
            "finish": told.finish,
            "mean advantage": told.advantage,
        }
        for row, told in ((row, records.row(row)) for row in rows)
    ]


@cache
def _text_of(model: str) -> TokenText | None:
    """The tokenizer of a model; None where it is gone. Reading it takes seconds where the vocabulary is large."""
    try:
        return TokenText(model)
    except PpoctlError:
        return None


def contract_of(paths: RunPaths) -> dict[str, str]:
    """Tags that say of each expectation, and of all together, whether the run meets it; none where it expects
    nothing, or has not come to its last step."""
    recipes = run_dir.recipes(paths)
    recipe, lines = recipes[max(recipes)], read_lines(paths.journal)
    if max((line["step"] for line in lines if "stage" in line), default=0) < recipe["steps"]:
        return {}  # `ppoctl rollout` and a save end in order, too
    asked = recipe.get("expect") or {}
    wanted = {metric: Expectation.model_validate(bounds) for metric, bounds in asked.items()}
    verdicts = check_expectations(wanted, lines)
    if not verdicts:
        return {}
    each = {f"ppoctl.contract.{metric_name(verdict.metric)}": _said(verdict) for verdict in verdicts}
    return {"ppoctl.contract": _word(*verdicts), **each}


def gpus_here() -> dict[str, float]:
    """How busy this machine's GPUs are, by the end of MLflow's names; those that they do not tell are left out."""
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
    from ppoctl.report.write import report_text

    return report_text(paths.root, steps=STEPS_WITH_SAMPLES)


def _said(verdict: ExpectationResult) -> str:
    value = "absent" if verdict.value is None else f"{verdict.value:.4g}"
    return f"{value} ({verdict.bound}): {_word(verdict)}"


def _word(*verdicts: ExpectationResult) -> str:
    return "met" if all(verdict.met for verdict in verdicts) else "unmet"
