"""What may go: never the last healthy state, never an artifact that some kept state still needs to move on from."""

import shutil

from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.layout import READABLE_STAGES, ROLES, STAGES, RunLayout


def saved_pairs(layout: RunLayout) -> list[int]:
    """Steps at which both roles have a committed state, oldest first."""
    steps = [set(layout.saved_steps(role)) for role in ROLES]
    return sorted(set.intersection(*steps))


def retain(layout: RunLayout, *, keep_last: int, keep_rollouts_every_steps: int) -> list[int]:
    """Delete states older than the last `keep_last` healthy pairs, and step folders that no kept pair needs.

    A pair is healthy when no health rule stopped the run at its step. Steps up to the oldest kept pair are not needed
    to restore anything; a sample of them keeps what `show` reads. Returns the steps whose folders went.
    """
    pairs = saved_pairs(layout)
    healthy = [step for step in pairs if _healthy(layout, step)]
    if len(healthy) < keep_last:
        return []
    oldest_kept = healthy[-keep_last]
    for role in ROLES:
        for step in layout.saved_steps(role):
            if step < oldest_kept:
                artifact.remove(layout.state(role, step))
    gone: list[int] = []
    for step in layout.committed_steps():
        if 0 < step <= oldest_kept:
            readable = keep_rollouts_every_steps > 0 and step % keep_rollouts_every_steps == 0
            _remove_stages(layout, step, keep=READABLE_STAGES if readable else ("eval",))
            gone.append(step)
    return gone


def _healthy(layout: RunLayout, step: int) -> bool:
    found = [manifests.read(layout.state(role, step)) for role in ROLES]
    return all(item is not None and bool(item.extra.get("healthy", True)) for item in found)


def _remove_stages(layout: RunLayout, step: int, *, keep: tuple[str, ...]) -> None:
    for stage in STAGES:
        if stage not in keep:
            artifact.remove(layout.stage(step, stage))
    shutil.rmtree(layout.parts(step), ignore_errors=True)
    folder = layout.step(step)
    if not any(folder.iterdir()):
        folder.rmdir()
