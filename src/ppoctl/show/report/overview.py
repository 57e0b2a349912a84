"""The overview of a report: model, data, progress, machine and time of each run."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ppoctl.algorithms.ppo_table import algorithm_name
from ppoctl.core import metric_registry
from ppoctl.core.clock import duration
from ppoctl.core.errors import without_secrets
from ppoctl.recipe.schema import Expectation
from ppoctl.show.report.expectations import check_expectations
from ppoctl.show.report.formatting import figure, moment
from ppoctl.show.report.run_reader import ReportedRun
from ppoctl.start.slurm import run_status
from ppoctl.start.slurm.run_state import DONE, attempts_as_known, run_state
from ppoctl.store.time_use import attempt_times

Json = dict[str, Any]


def head(run: ReportedRun) -> Json:
    """Return the overview of a run, for the first section of the page."""
    facts = run_status.facts(run, run.lines)
    snapshot = run_status.ask(run_status.slurm(), [facts])
    state = run_state(facts, snapshot, now=time.time())
    attempts = attempts_as_known(facts, snapshot)
    spends = attempt_times(run.lines)
    wall_s = sum(each.wall_s for each in spends)
    gpus = max((each.gpus for each in spends), default=0)
    hosts = list(dict.fromkeys(str(each["host"]) for each in attempts))
    rows = [
        ("state", f"{state.word}: {without_secrets(state.description)}"),
        ("steps", f"{facts.steps_done} of {facts.steps_planned}"),
        ("when", _when(run, wall_s)),
        ("where", ", ".join(hosts) + f", {gpus} GPU{'s' * (gpus != 1)}" * (gpus > 0) or "not started yet"),
        ("seed", str(run.recipe["seed"])),
        *_last(run),
    ]
    return {
        "label": run.label,
        "state": state.word,
        "sentence": sentence(run),
        "rows": rows,
        "attempts": attempts,
        "contract": contract(run, is_done=state.word in DONE),
        "identity": _identity(run),
    }


def sentence(run: ReportedRun) -> str:
    """Return one sentence with the model, the data, the reward and the batch size."""
    recipe, rows, written = (
        run.recipe,
        run.facts.get("rows", {}),
        run.facts.get("written", {}),
    )
    used = rows.get("data.train", {}).get("used")
    rollout = recipe["rollout"]
    prompts = f"{used} prompts of " if used is not None else ""
    groups = rollout.get("groups")
    kept = "" if groups is None else f", from at most {groups['max_rounds']} rounds"
    return without_secrets(
        f"{_short(recipe['model']['path'], written)}, "
        f"trained with {algorithm_name(recipe.get('ppo', {}))} on {prompts}"
        f"{_data(recipe['data']['train'], written)}, "
        f"rewarded by {recipe['reward'].get('kind', 'a custom reward')}: "
        f"{rollout['prompts_per_step']} prompts x {rollout['samples_per_prompt']} responses per step{kept}, "
        f"of at most {rollout['max_new_tokens']} tokens."
    )


def _short(path: Any, written: Mapping[str, str]) -> str:
    """Return the path as written in the recipe; if the recipe's path is unknown, as recorded."""
    return written.get(str(path), str(path))


def _data(table: Mapping[str, Any], written: Mapping[str, str]) -> str:
    """Return where the prompts come from: files, a dataset, a function, or the sources of a mix."""
    sources = table.get("sources") or {}
    if sources:
        return "a mix of " + ", ".join(f"{name} ({_data(source, written)})" for name, source in sources.items())
    paths = table.get("path")
    named = table.get("function") or (table.get("dataset") or {}).get("path")
    found = [paths] if isinstance(paths, str) else paths or [named or table["format"]]
    return ", ".join(_short(each, written) for each in found)


def _when(run: ReportedRun, wall_s: float) -> str:
    times = [float(line["at"]) for line in run.lines]
    if not times:
        return f"created {moment(float(run.facts['created']))}, not started"
    return f"{moment(times[0])} to {moment(times[-1])}; running for {duration(wall_s)}"


def _last(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the last reward, and the last value of each evaluation metric for which higher is better."""
    found = []
    reward = run.series.get(metric_registry.REWARD_SCORE_MEAN.name)
    if reward:
        found.append(("reward", _ends(reward)))
    for name in sorted(run.series):
        metric = metric_registry.find(name)
        if not name.startswith("eval/") or metric is None or metric.better != "higher":
            continue
        errors = dict(run.series.get(f"{name}_stderr", ()))
        found.append((name.removeprefix("eval/"), _ends(run.series[name], errors)))
    return found


def _ends(points: Sequence[tuple[int, float]], errors: Mapping[int, float] = MappingProxyType({})) -> str:
    """Return the last value of a metric, with its standard error if that is recorded, and then the first value."""
    (first_step, first), (step, value) = points[0], points[-1]
    error = f" \u00b1 {figure(errors[step])}" if step in errors else ""
    before = "" if step == first_step else f", {figure(first)} at step {first_step}"
    return f"{figure(value)}{error} at step {step}{before}"


def contract(run: ReportedRun, *, is_done: bool) -> Json:
    """Return the results of the recipe's `[expect]`. The results are provisional until all steps are done."""
    expect = run.recipe.get("expect") or {}
    wanted = {name: Expectation.model_validate(bounds) for name, bounds in expect.items()}
    results = check_expectations(wanted, run.lines)
    words = {True: "met", False: "unmet"} if is_done else {True: "met so far", False: "not yet met"}
    rows = [(each.metric, figure(each.value), each.bound, words[each.met], each.met) for each in results]
    return {"rows": rows, "is_done": is_done}


def _identity(run: ReportedRun) -> list[tuple[str, str]]:
    """Return the id, the time of creation, the versions and the digests of the sources of the run."""
    facts = run.facts
    return [
        ("id", str(facts["id"])),
        ("created", moment(float(facts["created"]))),
        *((f"version of {name}", str(version)) for name, version in sorted(facts.get("versions", {}).items())),
        *(
            ("time that chat templates read" if name == "clock" else f"sha256 of {name}", str(digest))
            for name, digest in sorted(facts.get("sources", {}).items())
        ),
    ]
