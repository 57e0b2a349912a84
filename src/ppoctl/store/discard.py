"""Setting parts of a run aside: moved into `discarded/attempt-N/`, never deleted. It is an attempt of its own, so
that an earlier one that is still alive somewhere puts nothing behind it. Light."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ppoctl.batch.sealed_json import repair_hint, sealed_line
from ppoctl.errors import CorruptArtifactError, RecipeError, StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.append import intact
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import REPAIRED, stage_line
from ppoctl.store.ledger import whole_blocks
from ppoctl.store.manifest import Manifest
from ppoctl.store.outline import EVAL, outlines_of
from ppoctl.store.resume_plan import ResumePlan, plan_resume
from ppoctl.store.retention import saved_steps
from ppoctl.store.run_paths import RunPaths


def repair(paths: RunPaths, plan: ResumePlan) -> tuple[ResumePlan, list[str]]:
    """Set aside everything broken and all that came after it, until a resume finds nothing missing or corrupt.

    Returns the plan that holds then, and lines for people on what was done. Raises StorageError where an item is
    broken again after it was set aside.
    """
    done: list[str] = []
    if plan.broken:
        attempt = claim(paths)
        plan = plan_resume(paths)
        handled = set[str]()
        while plan.broken:
            _require_new(paths, plan, handled)
            handled |= {item.name for item in plan.broken}
            done += _set_aside_broken(attempt, plan)
            plan = plan_resume(paths)
    return plan, done


def _require_new(paths: RunPaths, plan: ResumePlan, handled: set[str]) -> None:
    """Raise StorageError where an item that was handled is broken again. Names of items are finite, so that this
    bounds the passes of `make_whole`."""
    again = [item.description for item in plan.broken if item.name in handled]
    if again:
        raise StorageError(
            f"{', '.join(again)} of `{paths.root}` is broken again after it was set aside: the file system returns "
            "an old listing, or another process writes into the run",
            hint=repair_hint(paths.root),
        )


def roll_back(paths: RunPaths, step: int) -> tuple[ResumePlan, list[str]]:
    """Set aside everything after the saved states of `step`. Raises RecipeError when there is none.

    Returns the plan that holds then, and lines for people on what was done.
    """
    saved = saved_steps(paths, outlines_of(paths).roles)
    if step not in saved:
        kept = ", ".join(map(str, saved)) or "none"
        raise RecipeError(
            f"step {step} has no saved states to go back to (there are: {kept})",
            hint=f"see what there is: ppoctl status {quoted(paths.root)}",
        )
    attempt = claim(paths)
    later = [paths.inside(paths.step(each)) for each in paths.committed_steps() if each > step]
    done = _set_aside(attempt, [*_states_from(paths, step + 1), *later])
    return plan_resume(paths), done


def _set_aside_broken(attempt: Attempt, plan: ResumePlan) -> list[str]:
    """Move broken states, and from the first broken stage on all that came after it, states of later steps included:
    they were made from it."""
    broken = {item.name for item in plan.broken}
    done = _rewrite_lines(attempt, broken)
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
    folders += [paths.at_stop]  # of steps after the last saved one, all of them
    return [paths.inside(folder) for folder in folders]


def _set_aside(attempt: Attempt, names: Iterable[str]) -> list[str]:
    moved: list[str] = []
    for name in dict.fromkeys(names):
        source = attempt.paths.root / name
        if source.is_dir():
            attempt.set_aside(source)
            moved.append(f"set aside {name}")
    return moved


def _rewrite_lines(attempt: Attempt, broken: set[str]) -> list[str]:
    """Keep the intact lines of a damaged journal or ledger; make again what the manifests still tell."""
    layout = attempt.paths
    journal = layout.journal.name in broken
    ledger = layout.ledger.name in broken
    if not journal and not ledger:
        return []
    done: list[str] = []
    lines = intact(layout.journal)
    if ledger:
        blocks = [line for block in whole_blocks(intact(layout.ledger)) for line in block]
        done.append(_replace(attempt, layout.ledger, blocks))
    if journal:
        lines = _with_committed(layout, lines)
    seq = max([_told_seq(layout), *(int(line["seq"]) for line in lines)])
    files = sorted(broken)
    lines.append({"seq": seq + 1, "event": REPAIRED, "attempt": attempt.number, "at": time.time(), "files": files})
    said = _replace(attempt, layout.journal, lines)
    return [*done, said] if journal else done


def _replace(attempt: Attempt, path: Path, lines: list[dict[str, Any]]) -> str:
    """Put the damaged file aside and the lines in its place; returns a line that says so."""
    aside = attempt.free(attempt.paths.discarded(attempt.number) / path.name)
    if path.is_file():
        attempt.write(aside, path.read_bytes())
    attempt.write(path, b"".join(map(sealed_line, lines)))
    return f"kept {len(lines)} lines of {path.name}; as it was: {aside}"


def _with_committed(paths: RunPaths, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The journal's lines, and behind them those of committed stages that have lost theirs. Numbers are never used
    again where anybody still knows them: points in MLflow go by them."""
    seq = max([_told_seq(paths), *(int(line["seq"]) for line in lines)])
    last = {(line["step"], line["stage"]): line["identity"] for line in lines if "stage" in line}
    again: list[dict[str, Any]] = []
    outlines = outlines_of(paths)
    for step in paths.committed_steps():
        for stage in (*outlines.at(step).names, EVAL):
            manifest = _readable(paths.stage(step, stage))
            if manifest is not None and last.get((step, stage)) != manifest.identity:
                again.append({"seq": seq + len(again) + 1, **stage_line(manifest)})
    return lines + again


def _told_seq(paths: RunPaths) -> int:
    """Highest number of a journal line that a saved state knows of."""
    states = (_readable(paths.state(role, step)) for role, step in paths.saved_states())
    return max((int(state.extra["journal_seq"]) for state in states if state is not None), default=0)


def _readable(folder: Path) -> Manifest | None:
    try:
        return manifests.read(folder)
    except CorruptArtifactError:
        return None
