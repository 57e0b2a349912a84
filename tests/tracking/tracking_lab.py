"""A run directory that grows line by line, and queries to a real MLflow database."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppoctl.core.batch.sealed_json import seal, sealed_line
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.show.tracking.forwarder import Sent
from ppoctl.store.journal import read_lines
from ppoctl.store.outline import Outline, OutlineEntry, Outlines
from ppoctl.store.recorded_run import STORIES
from ppoctl.store.run_paths import FORMAT, RunPaths

_NAMES = ("rollout", "reward", "keep_groups", "actor_update")


def stage_lists(*, of_rounds: bool) -> dict[str, Any]:
    """Return the recorded stages of a run, with dynamic sampling if its stages run in rounds."""
    rounds = {"at_most": 4, "loop": 1} if of_rounds else {}
    entries = [OutlineEntry(name, (), **(rounds if name != "actor_update" else {})) for name in _NAMES]
    return Outlines({1: Outline("ppo", tuple(entries))}).as_json()


SETTINGS = MlflowTracking(kind="mlflow")
RECIPE: dict[str, Any] = {"name": "demo", "steps": 3, "ppo": {"kl": {"place": "loss", "coef": 0.001}}, "expect": {}}


class RunDir:
    """Writes what the store writes."""

    def __init__(self, root: Path, name: str = "demo") -> None:
        self.root = root / name
        self.root.mkdir(parents=True)
        self.seq = 0
        self.paths = RunPaths(self.root)
        identity = {"format": FORMAT, "name": name, "id": f"{len(name):032x}", "created": 1_763_700_000.5}
        self.paths.run_json.write_text(seal(identity, indent=1))
        self.paths.journal.touch()
        self.paths.recipes.mkdir()
        self.recipe(RECIPE)
        self.paths.recipe_toml.write_text('name = "demo"\n')

    def recipe(self, body: dict[str, Any]) -> None:
        for path in (self.paths.recipe_resolved, self.paths.recipe_from(1)):
            path.write_text(seal({STORIES: stage_lists(of_rounds=False), **body}, indent=1))

    def append(self, body: dict[str, Any]) -> dict[str, Any]:
        self.seq += 1
        line = {"seq": self.seq, "at": 1_763_712_000.25 + self.seq, **body}
        with self.paths.journal.open("ab") as file:
            file.write(sealed_line(line))
        return line

    def stage(self, step: int, stage: str, **metrics: float) -> dict[str, Any]:
        body = {"step": step, "stage": stage, "seconds": 1.5, "attempt": 1, "identity": "aa"}
        return self.append({**body, "figures": {name.replace("__", "/"): value for name, value in metrics.items()}})

    def step(self, step: int) -> None:
        self.stage(step, "rollout", rollout__tokens=100.0 * step, rollout__truncated_frac=0.0)
        self.stage(step, "reward", reward__score_mean=step / 10)
        self.stage(step, "actor_update", policy__loss=-0.1 * step, policy__approx_kl=0.01)

    def round(self, step: int, number: int, score: float, of_all: float) -> None:
        """Write round `number` of a step whose rounds have these scores: its own mean, and the mean of all so far."""
        suffix = "" if number == 1 else f".{number}"
        self.stage(step, f"rollout{suffix}", rollout__tokens=100.0 * number)
        self.stage(step, f"reward{suffix}", reward__score_mean=score)
        figures = {"rollout__tokens": 50.0 * number * (number + 1), "reward__score_mean": of_all}
        self.stage(step, f"keep_groups{suffix}", groups__rounds=float(number), **figures)

    def evaluation(self, step: int, rows: int = 2) -> None:
        folder = self.paths.stage(step, "eval")
        folder.mkdir(parents=True)
        (folder / "samples.jsonl").write_text("".join(json.dumps({"row": row}) + "\n" for row in range(rows)))
        self.stage(step, "eval", **{"eval__gsm8k__pass_at_1": 0.25})

    def event(self, event: str, **details: Any) -> dict[str, Any]:
        return self.append({"event": event, "attempt": 1, **details})


class Mlflow:
    """Queries a runs folder's database with MLflow's own client."""

    def __init__(self, runs_dir: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=f"sqlite:///{runs_dir.resolve() / 'mlflow.db'}")

    def runs(self) -> list[Any]:
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return list(self.client.search_runs(experiments))

    def run(self, name: str = "demo") -> Any:
        """Return the only run of that name."""
        (run,) = [run for run in self.runs() if run.info.run_name == name]
        return run

    def points(self, name: str = "demo") -> Counter[tuple[str, int, float, int]]:
        """Return the number of occurrences of each (metric, step, value, timestamp)."""
        run = self.run(name)
        return Counter(
            (metric.key, metric.step, metric.value, metric.timestamp)
            for key in run.data.metrics
            for metric in self.client.get_metric_history(run.info.run_id, key)
            if not key.startswith(("progress/", "system/"))
        )

    def table(self, experiment: str, path: str, run_id: str) -> Any:
        """Return a table as MLflow's pages find and read it, by its tag."""
        from mlflow.tracking._tracking_service.utils import _use_tracking_uri

        with _use_tracking_uri(self.client.tracking_uri):
            return self.client.load_table(experiment, path, run_ids=[run_id])

    def text(self, path: str, name: str = "demo") -> str:
        """Return the text of an artifact."""
        return Path(self.client.download_artifacts(self.run(name).info.run_id, path)).read_text()


def journaled_points(run_dir: Path) -> Counter[tuple[str, int, float, int]]:
    """Return the points that MLflow must contain in the end, computed from the journal by independent code."""
    expected: Counter[tuple[str, int, float, int]] = Counter()
    for line in read_lines(RunPaths(run_dir).journal):
        for name, value in line.get("figures", {}).items():
            if not math.isfinite(value):
                continue
            expected[(name, line["step"], value, int(line["at"] * 1000))] += 1
        if "stage" in line:
            expected[(f"time/{line['stage']}_s", line["step"], line["seconds"], int(line["at"] * 1000))] += 1
    return expected


def num_missing(sent: Sent) -> int:
    """Return how many items MLflow was missing, except files, which are sent each time."""
    return sum(vars(replace(sent, files=0)).values())


class MessageLog:
    """Collects messages; a test can wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()

    def __call__(self, text: str) -> None:
        with self._news:
            self.lines.append(text)
            self._news.notify_all()

    def wait_for(self, what: Callable[[str], bool], timeout_s: float = 60.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: any(map(what, self.lines)), timeout_s), self.lines
