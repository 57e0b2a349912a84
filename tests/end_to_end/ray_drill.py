"""A run in Ray processes, some of which are killed: python -m end_to_end.ray_drill FOLDER WHOLE LAYOUT KILLS (JSON).

A chain of attempts, as in `real_drill`: in each, processes are killed at the moments of a list, `STEP STAGE WHO`,
when the stage starts or a moment after; the last one ends the run. WHO is a rank of the actor, the critic, an engine,
this driver, or the raylet. A killed engine is restarted and the attempt continues; the others end it with their exit
code. After the last attempt, ledger, states and metrics must equal those of the undisturbed run, and nothing of any
attempt may be left. The undisturbed run is in WHOLE; it is made if it does not exist. Prints how each attempt ended.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil

import ray_forks
from end_to_end.drill import in_a_process, kill_self
from end_to_end.fork_server import preload
from end_to_end.real_drill import outcome, real_recipe
from leftover import shared_memory
from ppoctl.core.errors import ExitCode, PpoctlError
from ppoctl.recipe.schema import Recipe
from ppoctl.store.journal import JournalLine
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

SET_CHILD_SUBREAPER = 36
TITLES = {"actor": "ray::actor", "critic": "ray::critic", "engine": "ray::generator_engine", "raylet": "raylet"}
ENDS = {
    "driver": -signal.SIGKILL,
    "engine": 0,
    "actor": int(ExitCode.ENVIRONMENT),
    "critic": int(ExitCode.ENVIRONMENT),
    "raylet": int(ExitCode.ENVIRONMENT),
}
"""Exit code of an attempt in which this process was killed."""
LEFT_DEADLINE_S = 90.0


class Killer:
    """Kills at these moments, in order, each once. If the process does not exist yet when its stage starts, it is
    killed as soon as it exists."""

    def __init__(self, kills: list[str]) -> None:
        self.kills = list(kills)

    def on_stage(self, step: int, stage: str) -> None:
        for kill in [kill for kill in self.kills if kill.startswith(f"{step} {stage} ")]:
            self.kills.remove(kill)
            who = kill.split(" ")[2]
            if not strike(who):
                threading.Thread(target=_strike_when_there, args=(who,), daemon=True).start()

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        pass

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        pass

    def on_committed(self, line: JournalLine) -> None:
        pass


def strike(who: str) -> bool:
    """Send SIGKILL, and wait until the process has ended (Ray may not have noticed yet). Return False if it does not
    exist."""
    if who == "driver":
        kill_self()
    mine = psutil.Process().children(recursive=True)
    victim = next((process for process in mine if _has_title(process, TITLES[who])), None)
    if victim is None:
        return False
    victim.kill()
    psutil.wait_procs([victim], timeout=10)
    print(f"killed {who}", file=sys.stderr, flush=True)
    return True


def _strike_when_there(who: str) -> None:
    while not strike(who):
        time.sleep(0.02)


def _has_title(process: psutil.Process, title: str) -> bool:
    try:
        return title in process.cmdline()[0]
    except (psutil.Error, IndexError):
        return False


def attempt(root: Path, recipe: Recipe, kills: list[str]) -> None:
    ray_forks.start()
    ray_forks.show_ray()
    from ppoctl.run import new_run, session
    from ppoctl.run.run_recipe import recorded_recipes

    paths = RunPaths(root)
    components, digests = session.prepare(recipe, datetime.now())
    try:
        if not root.exists():
            new_run.create(paths, recipe, digests, command="train")
        recipes = recorded_recipes(RecordedRun(paths))
        session.attempt_run(
            session.OpenedRun(paths, recipes, components, plan_resume(RecordedRun(paths)), (Killer(kills),))
        )
    except PpoctlError as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr, flush=True)
        os._exit(int(error.exit_code))


def drill(root: Path, recipe: Recipe, attempts: list[list[str]]) -> list[int]:
    """Run an attempt for each list of kills; return how each ended (signals negative)."""
    ends = []
    for kills in attempts:
        print(f"== attempt with kills {kills}", file=sys.stderr, flush=True)
        ends.append(in_a_process(lambda kills=kills: attempt(root, recipe, kills), exits=True))
    return ends


def adopt() -> None:
    """Adopt every process that a driver leaves: it becomes a child of this process."""
    assert ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1) == 0


def left_behind(*, deadline_s: float = LEFT_DEADLINE_S) -> list[str]:
    """Return processes that outlive the run, after a while."""
    until = time.monotonic() + deadline_s
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left or time.monotonic() > until:
            return [" ".join(process.cmdline())[:120] for process in left]
        time.sleep(0.2)


def main(folder: Path, whole_run: Path, layout: dict[str, object], attempts: list[list[str]]) -> None:
    adopt()
    shared = shared_memory()
    preload()
    recipe = real_recipe(every_steps=1, **layout)
    if not whole_run.exists():
        assert drill(whole_run, recipe, [[]]) == [0]
    ends = drill(folder / "killed", recipe, attempts)
    killed, whole = outcome(folder / "killed"), outcome(whole_run)
    for part in whole:
        assert _without_sends(killed[part]) == _without_sends(whole[part]), (
            f"{part} differ:\n{killed[part]}\n{whole[part]}"
        )
    assert left_behind() == []
    until = time.monotonic() + LEFT_DEADLINE_S
    while left := shared_memory() - shared:  # a process of another test may be creating its own
        assert time.monotonic() < until, left
        time.sleep(0.2)
    print(json.dumps(ends))


def _without_sends(part: object) -> object:
    """Return a ledger line without the number of times that the sample was sent to an engine."""
    if isinstance(part, dict):
        return {
            key: _without_sends(value) for key, value in part.items() if key not in ("sends", "rollout/resent_seqs")
        }
    return [_without_sends(value) for value in part] if isinstance(part, list) else part


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
