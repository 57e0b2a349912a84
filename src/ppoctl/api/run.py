"""A run directory as pyarrow tables; `.to_pandas()` converts them to data frames.

The run directory is only read, so the run may still be running.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True, init=False)
class Run:
    """One run directory: its recipe, metrics, samples and ledger."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        """Open a run directory. Raises RecipeError if the folder is not a run directory."""
        object.__setattr__(self, "path", Path(path).resolve())
        self._recorded().facts  # noqa: B018 - it raises if the folder is not a run

    @property
    def layout(self) -> "RunPaths":
        """Paths of all files in the run directory."""
        from ppoctl.store.run_paths import RunPaths

        return RunPaths(self.path)

    def _recorded(self) -> "RecordedRun":
        """Return the run as it is recorded now."""
        from ppoctl.store.recorded_run import RecordedRun

        return RecordedRun(self.layout)

    @property
    def recipe(self) -> dict[str, Any]:
        """Recipe of the newest steps, with the value of every key."""
        return self._recorded().recipe

    @property
    def facts(self) -> dict[str, Any]:
        """Id of the run, its time of creation, versions, and digests of its sources."""
        return self._recorded().facts

    def metrics(self) -> "pyarrow.Table":
        """Return one row per step and one column per metric (`ppoctl recipes metrics` describes them).

        A value is null if the step does not have the metric. Step 0 is the evaluation before the first step.
        """
        from ppoctl.show.report.expectations import history
        from ppoctl.store.arrow_tables import as_table

        rows: dict[int, dict[str, float]] = {}
        for name, points in history(self.journal()).items():
            for step, value in points:
                rows.setdefault(step, {})[name] = value
        return as_table([{"step": step, **rows[step]} for step in sorted(rows)])

    def journal(self) -> list[dict[str, Any]]:
        """Return the journal in the order of writing: one entry for each committed artifact and each event."""
        return self._recorded().lines

    def ledger(self) -> "pyarrow.Table":
        """Return one row per sample and step: its prompt, its score, and the updates that used it."""
        from ppoctl.core.batch.sealed_json import whole_lines
        from ppoctl.store.append import read_whole
        from ppoctl.store.arrow_tables import as_table

        path = self.layout.ledger
        return as_table([line.body for line in whole_lines(path, read_whole(path))])

    def steps_with_samples(self) -> list[int]:
        """Return the steps whose rollouts are kept (`checkpoint.keep_rollouts_every_steps`)."""
        from ppoctl.store.stored_samples import steps_with_rollouts

        return steps_with_rollouts(self._recorded())

    def samples(self, step: int | None = None) -> "pyarrow.Table":
        """Return one row per response of a step. If `step` is None, this is the last step with rollouts.

        Columns are prompt and reward and, for each token, id, log-probs, value, advantage and KL from the reference.
        Values that the step has not computed are missing. Episodes have two more columns: `mask`, the tokens that the
        actor generated, and `episode`, its turns as JSON. Raises RecipeError if the step has no rollouts.
        """
        from ppoctl.show.report.shown_sample import read_samples
        from ppoctl.store.arrow_tables import as_table

        if step is None:
            step = max(self.steps_with_samples(), default=1)
        return as_table([sample.as_dict() for sample in read_samples(self._recorded(), step)])

    def evaluations(self) -> "pyarrow.Table":
        """Return one row per sample of every evaluation, with the step after which the evaluation ran."""
        from ppoctl.store.arrow_tables import as_table
        from ppoctl.store.stored_samples import evaluation_rows

        run = self._recorded()
        rows = ({"step": step, **row} for step in run.evaluated_steps() for row in evaluation_rows(run, step))
        return as_table(list(rows))
