"""MLflow as a mirror of a run directory: a thread that follows the journal, and a rebuild in the foreground.

    training thread                     mirror thread (daemon)
      store appends to journal.jsonl
      notify() ------ event ---------->   opens MLflow (import, connect), sends what it lacks, waits
      close(status, deadline_s) ------>   sends the rest, sets the status, ends

Training never waits for MLflow and never fails because of it: what cannot be sent stays in the journal, which is the
truth, and is sent by the next try, the next attempt or `rebuild`. Nothing here is used in child processes.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ppoctl.errors import EnvironmentProblemError, PpoctlError, quoted, without_secrets
from ppoctl.machine.system_metrics import SystemMetrics
from ppoctl.machine.versions import versions
from ppoctl.recipe.schema import MlflowTracking
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.tracking.forwarder import Forwarder, Sent
from ppoctl.tracking.mirror_hooks import MirrorHooks
from ppoctl.tracking.mlflow_payloads import Ending, ending
from ppoctl.tracking.mlflow_run import Address, KeptRuns, MirrorTarget, MlflowRun, address_of

OpenTarget = Callable[[RunPaths, Address], MirrorTarget]


@dataclass(frozen=True)
class MirrorIntervals:
    """Pauses of the mirror thread, in seconds."""

    poll_s: float = 10.0
    """Seconds between looks at the journal when nobody notifies."""
    first_retry_s: float = 1.0
    """Seconds before the first retry; doubled after each failure that follows."""
    longest_retry_s: float = 60.0
    silent_s: float = 7.0
    """Seconds that the end of an attempt waits without saying for what."""
    measure_s: float = 10.0
    """Seconds between figures of the machine."""


class MlflowMirror:
    """Mirror of one attempt in MLflow. Start it when the engines are imported: two threads that import the same
    packages at one time can see half-made modules, and nothing is committed before that anyway."""

    def __init__(
        self,
        run_dir: Path,
        settings: MlflowTracking,
        *,
        attempt: int,
        around: MirrorHooks,
        open_target: OpenTarget = MlflowRun,
        patience: MirrorIntervals = MirrorIntervals(),
    ) -> None:
        """Prepare to mirror this `attempt`; once a newer one has started, the status is that one's to set.
        `around.notify` gets one line when MLflow goes away, one when it is back, from the mirror's thread."""
        self._layout = RunPaths(run_dir.resolve())
        self._address = address_of(settings, self._layout.root.parent)
        self._attempt = attempt
        self._around = around
        self._say = around.notify
        self._open_target = open_target
        self._patience = patience
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._abandoned = threading.Event()
        self._settled = False
        self._down = False
        self._ended_as: str | None = None
        self._forwarder: Forwarder | None = None
        self._thread = threading.Thread(target=self._work, name="mlflow-mirror", daemon=True)

    def start(self) -> None:
        """Start to mirror; returns at once."""
        self._thread.start()

    def notify(self) -> None:
        """Hear that the journal has a new line; returns at once."""
        self._wake.set()

    def close(self, status: str, deadline_s: float) -> bool:
        """Send the rest and set the final status, waiting no longer than the deadline; call it after the journal has
        its `attempt_ended` line. `status` is that line's word.

        Returns whether MLflow has everything, and says the command that sends the rest where it has not; says nothing
        where the mirror was never started, because the attempt failed before it had anything to send.
        """
        self._ended_as = status
        self._closing.set()
        self._wake.set()
        if self._thread.ident is None:
            return False
        until = time.monotonic() + deadline_s
        self._thread.join(min(deadline_s, self._patience.silent_s))
        while self._thread.is_alive() and (left_s := until - time.monotonic()) > 0:
            more = math.ceil(left_s)
            self._say(f"mlflow: it has not taken everything yet; waiting for it, at most {more} s more")
            self._thread.join(min(left_s, self._patience.silent_s))
        if not self._settled:
            self._abandoned.set()
            command = f"ppoctl track {quoted(self._layout.root)}"
            self._say(f"mlflow: not everything was sent; send the rest with: {command}")
        return self._settled

    def _work(self) -> None:
        """Run the thread: forward, wait for news; on failure wait longer each time and open the target anew."""
        patience = self._patience
        pause_s = patience.first_retry_s
        machine, due = SystemMetrics(self._layout.root, self._around.gpus), time.monotonic() + patience.measure_s
        while not self._abandoned.is_set():
            closing = self._closing.is_set()
            try:
                self._forward(closing=closing)
            except Exception as problem:  # noqa: BLE001 - worker boundary: no failure of MLflow may reach training
                self._forwarder = None
                self._tell_down(problem)
                if closing:
                    return
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, patience.longest_retry_s)
                continue
            self._tell_up()
            pause_s = patience.first_retry_s
            if closing:
                self._settled = not self._abandoned.is_set()
                return
            if time.monotonic() >= due:
                due = time.monotonic() + patience.measure_s
                self._measure(machine)
            self._wake.wait(min(patience.poll_s, max(due - time.monotonic(), 0.0)))
            self._wake.clear()

    def _forward(self, *, closing: bool) -> None:
        if self._forwarder is None:
            target = self._open_target(self._layout, self._address)
            self._forwarder = Forwarder(self._layout, target, self._around.samples)
            self._forwarder.describe({f"ppoctl.version.{name}": found for name, found in versions().items()})
            if not closing:
                self._set_status(self._forwarder, closing=False)
        self._forwarder.forward(stop=self._abandoned.is_set)
        if closing and not self._abandoned.is_set():
            self._set_status(self._forwarder, closing=True)
        self._forwarder.keep_files()
        if closing:
            self._forwarder.keep(_made(self._around, self._abandoned.is_set))

    def _measure(self, machine: SystemMetrics) -> None:
        """Send figures of the machine, or not: the journal does not have them, and nobody waits for them."""
        assert self._forwarder is not None
        with suppress(Exception):
            self._forwarder.measure(machine.measured(), time.time())

    def _set_status(self, forwarder: Forwarder, *, closing: bool) -> None:
        """Set the status by the journal, or by the word given to `close` where this attempt could not write down its
        end. A newer attempt sets its own: it may end between our look at the journal and what we send."""
        found = ending(read_lines(self._layout.journal))
        if found.attempt not in (None, self._attempt):
            return
        if closing and found.word == "running":
            assert self._ended_as is not None
            found = Ending(self._ended_as, self._attempt, int(time.time() * 1000))
        forwarder.end(_judged(found, self._around))

    def _tell_down(self, problem: Exception) -> None:
        if not self._down and not self._abandoned.is_set():
            self._say(
                f"mlflow: `{self._address.shown}` does not take what is sent ({_reason(problem)}); training goes on, "
                "the journal keeps everything"
            )
        self._down = True

    def _tell_up(self) -> None:
        if self._down and not self._abandoned.is_set():
            self._say(f"mlflow: `{self._address.shown}` is back and has everything")
        self._down = False


def rebuild(run_dir: Path, settings: MlflowTracking, around: MirrorHooks = MirrorHooks()) -> Sent:
    """Send everything that MLflow lacks of a run, in the foreground; a second call sends its files again and nothing
    else.

    Raises RecipeError where the folder is no run directory, EnvironmentProblemError when MLflow cannot be reached.
    """
    paths = RunPaths(run_dir.resolve())
    address = address_of(settings, paths.root.parent)
    try:
        worker = Forwarder(paths, MlflowRun(paths, address), around.samples)
        sent = worker.describe({}) + worker.forward()
        sent += worker.end(_judged(ending(read_lines(paths.journal)), around)) + worker.keep_files()
        return sent + worker.keep(_made(around))
    except PpoctlError:
        raise
    except Exception as problem:
        raise EnvironmentProblemError(
            f"MLflow at `{address.shown}` does not take what is sent: {_reason(problem)}",
            hint=f"what is missing is sent by running this again: ppoctl track {quoted(paths.root)}",
        ) from problem


def _judged(found: Ending, around: MirrorHooks) -> Ending:
    """The ending with how its contract is met, where that is known."""
    return replace(found, contract=around.contract()) if found.is_judged else found


def _made(around: MirrorHooks, stop: Callable[[], bool] = lambda: False) -> Mapping[str, str]:
    """Files that are made for MLflow; none, and a line, where they cannot be made; none once nobody waits."""
    if stop():
        return {}
    try:
        return around.files()
    except Exception as problem:  # noqa: BLE001 - whatever it is: the run is whole without them
        around.notify(f"mlflow: the report could not be made ({_reason(problem)}); the run is not affected")
        return {}


def kept_by_mlflow(run_dir: Path, settings: MlflowTracking) -> KeptRuns:
    """What MLflow has of a run. Raises EnvironmentProblemError when MLflow cannot be reached."""
    paths = RunPaths(run_dir.resolve())
    address = address_of(settings, paths.root.parent)
    try:
        return KeptRuns(paths, address)
    except PpoctlError:
        raise
    except Exception as problem:
        raise EnvironmentProblemError(
            f"MLflow at `{address.shown}` does not say what it has of run `{run_dir}`: {_reason(problem)}; "
            "nothing was deleted",
            hint=f"try again, or delete the directory only: ppoctl rm {quoted(run_dir)} --keep-tracking",
        ) from problem


def _reason(problem: Exception) -> str:
    """The first line of what went wrong, short enough for one line of a log."""
    text = (str(problem).strip().splitlines() or [""])[0] or type(problem).__name__
    return without_secrets(text)[:200]
