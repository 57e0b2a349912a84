"""MLflow as a mirror of a run directory: a thread that follows the journal, and a rebuild in the foreground.

    training thread                     mirror thread (daemon)
      store appends to journal.jsonl
      notify() ------ event ---------->   opens MLflow (import, connect), sends missing lines, waits
      close(status, deadline_s) ------>   sends the rest, sets the status, ends

Training never waits for MLflow and never fails because of it. Lines that cannot be sent remain in the journal, which
is the only source; the next try, the next attempt or `rebuild` sends them. Child processes do not use this module.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, PpoctlError, quoted
from ppoctl.core.machine.system_metrics import SystemMetrics
from ppoctl.core.machine.versions import versions
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.forwarder import Forwarder, Sent
from ppoctl.show.tracking.mlflow_payloads import Ending, ending
from ppoctl.show.tracking.mlflow_problems import fix, reason
from ppoctl.show.tracking.mlflow_run import Address, KeptRuns, MirrorTarget, MlflowRun, address_of
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths


def _silent(_: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class MirrorHooks:
    """Functions that a mirror calls from its own thread.

    If `files` fails, the mirror reports it in one line; if `gpus` fails, the metrics are omitted.
    """

    notify: Callable[[str], None] = _silent
    """Receives a message of one line."""
    contract: Callable[[], Mapping[str, str]] = dict
    """Returns the tags with the result of `[expect]`, for a run that finished all steps."""
    files: Callable[[], Mapping[str, str]] = dict
    """Returns the text files that are uploaded when an attempt ends, by their names in MLflow."""
    samples: Callable[[int], Sequence[Mapping[str, Any]]] = lambda _: ()
    """Returns a few training samples of a step, if its records still exist."""
    gpus: Callable[[], Mapping[str, float]] = dict
    """Returns metrics of this machine's GPUs, by the last part of their names in MLflow."""


OpenTarget = Callable[[RunPaths, Address], MirrorTarget]


@dataclass(frozen=True)
class MirrorIntervals:
    """Intervals of the mirror thread, in seconds."""

    poll_s: float = 10.0
    """Seconds between reads of the journal without a notification."""
    first_retry_s: float = 1.0
    """Seconds before the first retry; the pause is doubled after each further failure."""
    longest_retry_s: float = 60.0
    silent_s: float = 7.0
    """Seconds for which the end of an attempt waits for MLflow without a message."""
    measure_s: float = 10.0
    """Seconds between metrics of the machine."""


class MlflowMirror:
    """Mirror of one attempt in MLflow.

    Start it after the engines are imported: two threads that import the same packages at the same time can see
    half-initialized modules. No stage is committed before that.
    """

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
        """Prepare to mirror this `attempt`. After a newer attempt has started, only that attempt sets the status.

        `around.notify` receives one line when MLflow becomes unreachable and one when it is reachable again, from the
        mirror's thread.
        """
        self._paths = RunPaths(run_dir.resolve())
        self._address = address_of(settings, self._paths.root.parent)
        self._attempt = attempt
        self._hooks = around
        self._notify = around.notify
        self._open_target = open_target
        self._intervals = patience
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
        """Handle a new line of the journal; returns at once."""
        self._wake.set()

    def close(self, status: str, deadline_s: float) -> bool:
        """Send the remaining lines and set the final status, within the deadline.

        Call it after the journal has its `attempt_ended` line; `status` is the status of that line. Returns whether
        MLflow has everything; otherwise the mirror reports the command that sends the rest. If the mirror was never
        started, because the attempt failed before that, the mirror reports nothing.
        """
        self._ended_as = status
        self._closing.set()
        self._wake.set()
        if self._thread.ident is None:
            return False
        until = time.monotonic() + deadline_s
        self._thread.join(min(deadline_s, self._intervals.silent_s))
        while self._thread.is_alive() and (left_s := until - time.monotonic()) > 0:
            more = math.ceil(left_s)
            self._notify(f"mlflow: the upload is not complete yet; waiting at most {more} s more")
            self._thread.join(min(left_s, self._intervals.silent_s))
        if not self._settled:
            self._abandoned.set()
            command = f"ppoctl track {quoted(self._paths.root)}"
            self._notify(f"mlflow: the upload is not complete; send the rest with: {command}")
        return self._settled

    def _work(self) -> None:
        """Run the thread: forward lines and wait for new ones. After a failure, wait and reopen the target.

        The waiting time is doubled after each consecutive failure.
        """
        intervals = self._intervals
        pause_s = intervals.first_retry_s
        machine, due = SystemMetrics(self._paths.root, self._hooks.gpus), time.monotonic() + intervals.measure_s
        while not self._abandoned.is_set():
            closing = self._closing.is_set()
            try:
                self._forward(closing=closing)
            except Exception as problem:  # noqa: BLE001 - worker boundary: no failure of MLflow may reach training
                self._forwarder = None
                self._report_down(problem)
                if closing:
                    return
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, intervals.longest_retry_s)
                continue
            self._report_up()
            pause_s = intervals.first_retry_s
            if closing:
                self._settled = not self._abandoned.is_set()
                return
            if time.monotonic() >= due:
                due = time.monotonic() + intervals.measure_s
                self._measure(machine)
            self._wake.wait(min(intervals.poll_s, max(due - time.monotonic(), 0.0)))
            self._wake.clear()

    def _forward(self, *, closing: bool) -> None:
        if self._forwarder is None:
            target = self._open_target(self._paths, self._address)
            self._forwarder = Forwarder(self._paths, target, self._hooks.samples)
            self._forwarder.describe({f"ppoctl.version.{name}": version for name, version in versions().items()})
            if not closing:
                self._set_status(self._forwarder, closing=False)
        self._forwarder.forward(stop=self._abandoned.is_set)
        # The status precedes the files, which a client may not be allowed to write.
        if closing and not self._abandoned.is_set():
            self._set_status(self._forwarder, closing=True)
        self._forwarder.keep_files()
        if closing:
            self._forwarder.keep(_report_files(self._hooks, self._abandoned.is_set))

    def _measure(self, machine: SystemMetrics) -> None:
        """Send metrics of the machine. Errors are ignored: these metrics are not in the journal and not required."""
        assert self._forwarder is not None
        with suppress(Exception):
            self._forwarder.measure(machine.measured(), time.time())

    def _set_status(self, forwarder: Forwarder, *, closing: bool) -> None:
        """Set the status from the journal, or from `close` if this attempt could not record its end.

        If a newer attempt has started, do nothing: that attempt sets the status, and it may end between the read of
        the journal and the call of MLflow.
        """
        recorded = ending(read_lines(self._paths.journal))
        if recorded.attempt not in (None, self._attempt):
            return
        if closing and recorded.word == "running":
            assert self._ended_as is not None
            recorded = Ending(self._ended_as, self._attempt, int(time.time() * 1000))
        forwarder.end(_with_contract(recorded, self._hooks))

    def _report_down(self, problem: Exception) -> None:
        if not self._down and not self._abandoned.is_set():
            self._notify(
                f"mlflow: cannot upload to `{self._address.shown}` ({reason(problem)}); training continues, and the "
                "journal keeps everything"
            )
        self._down = True

    def _report_up(self) -> None:
        if self._down and not self._abandoned.is_set():
            self._notify(f"mlflow: `{self._address.shown}` is reachable again and has everything")
        self._down = False


def rebuild(run_dir: Path, settings: MlflowTracking, around: MirrorHooks = MirrorHooks()) -> Sent:
    """Upload the parts of a run that MLflow does not have, in the foreground. A second call uploads only the files.

    Raises RecipeError if the folder is not a run directory; EnvironmentProblemError if MLflow cannot be reached.
    """
    paths = RunPaths(run_dir.resolve())
    address = address_of(settings, paths.root.parent)
    try:
        worker = Forwarder(paths, MlflowRun(paths, address), around.samples)
        sent = worker.describe({}) + worker.forward()
        sent += worker.end(_with_contract(ending(read_lines(paths.journal)), around)) + worker.keep_files()
        return sent + worker.keep(_report_files(around))
    except PpoctlError:
        raise
    except Exception as problem:
        raise EnvironmentProblemError(
            f"cannot upload to MLflow at `{address.shown}`: {reason(problem)}",
            hint=fix(problem, address, paths.root),
        ) from problem


def _with_contract(ended: Ending, hooks: MirrorHooks) -> Ending:
    """Return the ending with the result of `[expect]`, if the result is known."""
    return replace(ended, contract=hooks.contract()) if ended.is_judged else ended


def _report_files(hooks: MirrorHooks, stop: Callable[[], bool] = lambda: False) -> Mapping[str, str]:
    """Return the report files for MLflow; no files after `stop`, or after an error, which is reported in a line."""
    if stop():
        return {}
    try:
        return hooks.files()
    except Exception as problem:  # noqa: BLE001 - the run is complete without the report
        hooks.notify(f"mlflow: the report could not be created ({reason(problem)}); the run is not affected")
        return {}


def kept_by_mlflow(run_dir: Path, settings: MlflowTracking) -> KeptRuns:
    """Return the MLflow runs of a run. Raises EnvironmentProblemError if MLflow cannot be reached."""
    paths = RunPaths(run_dir.resolve())
    address = address_of(settings, paths.root.parent)
    try:
        return KeptRuns(paths, address)
    except PpoctlError:
        raise
    except Exception as problem:
        raise EnvironmentProblemError(
            f"cannot query MLflow at `{address.shown}` about run `{run_dir}`: {reason(problem)}; nothing was deleted",
            hint=f"try again, or delete the directory only: ppoctl rm {quoted(run_dir)} --keep-tracking",
        ) from problem
