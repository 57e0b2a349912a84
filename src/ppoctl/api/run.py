"""A run directory as tables. It is only read, and may be at work. Tables are pyarrow's; `.to_pandas()` makes data
frames of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

    from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True, init=False)
class Run:
    """One run directory: what it was asked, its figures, its samples, its ledger."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        """Take a run directory. Raises RecipeError where the folder is none."""
        from ppoctl.store import run_dir

        object.__setattr__(self, "path", Path(path).resolve())
        run_dir.facts(self.layout)

    @property
    def layout(self) -> "RunPaths":
        """Paths of everything in it."""
        from ppoctl.store.run_paths import RunPaths

        return RunPaths(self.path)

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe as it holds for the newest steps, every key with its value."""
        from ppoctl.store import run_dir

        recipes = run_dir.recipes(self.layout)
        return recipes[max(recipes)]

    @property
    def facts(self) -> dict[str, Any]:
        """What it was made from and when: id, versions, digests of its sources."""
        from ppoctl.store import run_dir

        return run_dir.facts(self.layout)

    def metrics(self) -> "pyarrow.Table":
        """One row per step, one column per figure (`ppoctl recipes metrics` says what each is); null where a step
        has none. Step 0 is the evaluation before the first step."""
        from ppoctl.loop.expectations import history
        from ppoctl.store.arrow_tables import as_table
        from ppoctl.store.journal import read_lines

        rows: dict[int, dict[str, float]] = {}
        for name, points in history(read_lines(self.layout.journal)).items():
            for step, value in points:
                rows.setdefault(step, {})[name] = value
        return as_table([{"step": step, **rows[step]} for step in sorted(rows)])

    def journal(self) -> list[dict[str, Any]]:
        """What happened, in order: one entry per committed artifact and per event."""
        from ppoctl.store.journal import read_lines

        return read_lines(self.layout.journal)

    def ledger(self) -> "pyarrow.Table":
        """One row per sample and step: what it was drawn with, and which updates used it."""
        from ppoctl.batch.sealed_json import whole_lines
        from ppoctl.store.append import read_whole
        from ppoctl.store.arrow_tables import as_table

        path = self.layout.ledger
        return as_table([line.body for line in whole_lines(path, read_whole(path))])

    def steps_with_samples(self) -> list[int]:
        """Steps whose rollouts are still there (`checkpoint.keep_rollouts_every_steps`)."""
        from ppoctl.store.samples import steps_with_rollouts

        return steps_with_rollouts(self.layout)

    def samples(self, step: int | None = None) -> "pyarrow.Table":
        """One row per response of a step (absent: of the last with rollouts), with prompt, reward and, per token,
        ids, log-probs, values, advantages and KL from the reference as far as the step has come. Raises RecipeError
        where it has no rollouts."""
        from ppoctl.runs.samples import read_samples
        from ppoctl.store.arrow_tables import as_table

        if step is None:
            step = max(self.steps_with_samples(), default=1)
        return as_table([vars(sample) for sample in read_samples(self.layout, step)])

    def evaluations(self) -> "pyarrow.Table":
        """One row per sample of every evaluation that is there, with the step that it was made after."""
        from ppoctl.store.arrow_tables import as_table
        from ppoctl.store.samples import evaluation_rows, steps_with_evaluation

        layout = self.layout
        steps = steps_with_evaluation(layout)
        return as_table([{"step": step, **row} for step in steps for row in evaluation_rows(layout, step)])
