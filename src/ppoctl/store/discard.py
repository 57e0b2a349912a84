"""Discards of a run's artifacts: they are moved to `discarded/attempt-N/` and never deleted. Imports no torch.

A discard is an attempt with a new number, so that an earlier attempt that is still alive cannot change the run later.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppoctl.core.batch.sealed_json import repair_hint, sealed_line
from ppoctl.core.errors import CorruptArtifactError, RecipeError, StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.append import intact
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import REPAIRED, stage_line
from ppoctl.store.ledger import whole_blocks
from ppoctl.store.manifest import Manifest
from ppoctl.store.outline import EVAL
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import ResumePlan, plan_resume
from ppoctl.store.run_paths import RunPaths


def repair(run: RecordedRun, plan: ResumePlan) -> tuple[ResumePlan, list[str]]:
    """Move broken artifacts, and all that were computed after a broken stage, aside until a resume finds no fault.

    Returns the new plan, and one line for each action. Raises StorageError if an item is broken again after it was
    moved aside.
    """
    done: list[str] = []
    if plan.broken:
        attempt = claim(run.paths)
        plan = _plan_again(run)
        handled = set[str]()
        while plan.broken:
            _require_new(run.paths, plan, handled)
            handled |= {item.name for item in plan.broken}
            done += _set_aside_broken(attempt, run, plan)
            plan = _plan_again(run)
    return plan, done


def _plan_again(run: RecordedRun) -> ResumePlan:
    run.refresh()
    return plan_resume(run)


def _require_new(paths: RunPaths, plan: ResumePlan, handled: set[str]) -> None:
    """Raise StorageError if an item that was handled is broken again.

    The number of item names is finite, so this check limits the passes of `repair`.
    """
    again = [item.description for item in plan.broken if item.name in handled]
    if again:
        raise StorageError(
            f"{', '.join(again)} of `{paths.root}` is broken again after it was moved aside: the file system returns "
            "an old listing, or another process writes into the run",
            hint=repair_hint(paths.root),
        )


def roll_back(run: RecordedRun, step: int) -> tuple[ResumePlan, list[str]]:
    """Move aside every artifact that is later than the saved states of `step`.

    Returns the new plan, and one line for each action. Raises RecipeError if the step has no saved states.
    """
    paths, saved = run.paths, run.saved_steps
    if step not in saved:
        kept = ", ".join(map(str, saved)) or "none"
        raise RecipeError(
            f"step {step} has no saved states to go back to (saved steps: {kept})",
            hint=f"list the saved steps: ppoctl status {quoted(paths.root)}",
        )
    attempt = claim(paths)
    later = [paths.inside(paths.step(later_step)) for later_step in paths.committed_steps() if later_step > step]
    done = _set_aside(attempt, [*_states_from(paths, step + 1), *later])
    return _plan_again(run), done


def _set_aside_broken(attempt: Attempt, run: RecordedRun, plan: ResumePlan) -> list[str]:
    """Move aside broken states, and the first broken stage with every stage and state that was computed after it."""
    broken = {item.name for item in plan.broken}
    done = _rewrite_lines(attempt, run, broken)
    names = [name for name in broken if name.startswith("states/")]
    order = [item.name for item in plan.items if item.name.startswith("steps/")]
    first = next((index for index, name in enumerate(order) if name in broken), None)
    if first is not None:
        step = int(order[first].split("/")[1])
        names += [*order[first:], *_states_from(attempt.paths, step)]
    return done + _set_aside(attempt, names)


def _states_from(paths: RunPaths, step: int) -> list[str]:
    folders = [paths.state(role, saved) for role, saved in paths.saved_states() if saved >= step]
    folders += [folder for folder in paths.best_states() if int(folder.name) >= step]
    folders += [paths.at_stop]  # all of its states are of steps after the last saved step
    return [paths.inside(folder) for folder in folders]


def _set_aside(attempt: Attempt, names: Iterable[str]) -> list[str]:
    moved: list[str] = []
    for name in dict.fromkeys(names):
        source = attempt.paths.root / name
        if source.is_dir():
            attempt.set_aside(source)
            moved.append(f"moved aside {name}")
    return moved


def _rewrite_lines(attempt: Attempt, run: RecordedRun, broken: set[str]) -> list[str]:
    """Keep the intact lines of a damaged journal or ledger; restore lost journal lines from the manifests."""
    paths = attempt.paths
    journal = paths.journal.name in broken
    ledger = paths.ledger.name in broken
    if not journal and not ledger:
        return []
    done: list[str] = []
    lines = intact(paths.journal)
    if ledger:
        blocks = [line for block in whole_blocks(intact(paths.ledger)) for line in block]
        done.append(_replace(attempt, paths.ledger, blocks))
    if journal:
        lines = _with_committed(run, lines)
    seq = max([_recorded_seq(paths), *(int(line["seq"]) for line in lines)])
    files = sorted(broken)
    lines.append({"seq": seq + 1, "event": REPAIRED, "attempt": attempt.number, "at": time.time(), "files": files})
    message = _replace(attempt, paths.journal, lines)
    return [*done, message] if journal else done


def _replace(attempt: Attempt, path: Path, lines: list[dict[str, Any]]) -> str:
    """Move the damaged file aside and write the lines in its place. Returns a line that reports the move."""
    aside = attempt.free(attempt.paths.discarded(attempt.number) / path.name)
    if path.is_file():
        attempt.write(aside, path.read_bytes())
    attempt.write(path, b"".join(map(sealed_line, lines)))
    return f"kept {len(lines)} lines of {path.name}; the damaged file is {aside}"


def _with_committed(run: RecordedRun, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the journal's lines, followed by new lines for committed stages whose line was lost.

    A line number that a saved state recorded is never used again, because MLflow identifies points by line numbers.
    """
    paths = run.paths
    seq = max([_recorded_seq(paths), *(int(line["seq"]) for line in lines)])
    last = {(line["step"], line["stage"]): line["identity"] for line in lines if "stage" in line}
    again: list[dict[str, Any]] = []
    for step in paths.committed_steps():
        names = (stage.name for stage in run.stages(step))
        for stage in (*names, EVAL):
            manifest = _readable(paths.stage(step, stage))
            if manifest is not None and last.get((step, stage)) != manifest.identity:
                of_the_step = [line for line in (*lines, *again) if "stage" in line and line["step"] == step]
                again.append({"seq": seq + len(again) + 1, **stage_line(manifest, of_the_step)})
    return lines + again


def _recorded_seq(paths: RunPaths) -> int:
    """Return the highest number of a journal line that a saved state recorded."""
    states = (_readable(paths.state(role, step)) for role, step in paths.saved_states())
    return max((int(state.extra["journal_seq"]) for state in states if state is not None), default=0)


def _readable(folder: Path) -> Manifest | None:
    try:
        return manifests.read(folder)
    except CorruptArtifactError:
        return None
