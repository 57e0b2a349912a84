"""All paths of a run directory; no other module builds them. Imports only the standard library.

runs/NAME/  recipe.toml  recipe.resolved.json  run.json  journal.jsonl  ledger.jsonl  stop.json
  recipes/000001.json                  the recipe that applies from that step on
  logs/attempt-3/                      one folder per attempt
  drafts/attempt-3/                    changes that the newest attempt prepares; a file for each older attempt
  jobs/4711.json  jobs/4711.sh         two files per Slurm job
  steps/000041/  10-rollout/ 20-reward/ 30-values/ ... 80-eval/     (each: record.safetensors, manifest.json)
  states/actor/000041/  states/critic/000041/  states/best/  states/at-stop/actor/
  tensorboard/                         an event file with the metrics of the journal
"""

from dataclasses import dataclass
from pathlib import Path

NUMBERS = {
    "partial_rollout": 9,
    "rollout": 10,
    "reward": 20,
    "greedy_rollout": 22,
    "greedy_reward": 24,
    "keep_groups": 25,
    "all_rows": 27,
    "values": 30,
    "logprobs": 40,
    "correction": 45,
    "advantages": 50,
    "critic_advantages": 52,
    "resample": 55,
    "whitening": 56,
    "critic_update": 60,
    "actor_update": 70,
    "next_rollout": 75,
    "eval": 80,
}
"""Number in front of a stage's folder name, so that `ls` lists the stages in order. Other stages are not numbered."""

FORMAT = 3
"""Version of the directory's format, written into run.json and every manifest."""

MANIFEST = "manifest.json"
RECORD = "record.safetensors"


@dataclass(frozen=True)
class RunPaths:
    """Paths of one run directory."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    def inside(self, folder: Path) -> str:
        """Return the path of a folder relative to the run: `steps/000003/10-rollout`."""
        return folder.relative_to(self.root).as_posix()

    @property
    def recipe_toml(self) -> Path:
        return self.root / "recipe.toml"

    @property
    def recipe_resolved(self) -> Path:
        return self.root / "recipe.resolved.json"

    @property
    def recipes(self) -> Path:
        return self.root / "recipes"

    def recipe_from(self, step: int) -> Path:
        return self.recipes / f"{step:06d}.json"

    @property
    def run_json(self) -> Path:
        return self.root / "run.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    def profile(self, step: int) -> Path:
        """Return the folder of the traces of a step that `ppoctl profile` ran again."""
        return self.root / "profile" / f"step-{step:06d}"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event file for TensorBoard (`tracking.tensorboard`)."""
        return self.root / "tensorboard"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def attempt(self, number: int) -> Path:
        return self.logs / f"attempt-{number}"

    def console_log(self, number: int) -> Path:
        """Return the path of the log of the lines that an attempt printed to its terminal."""
        return self.attempt(number) / "console.log"

    def drafts(self, number: int | None = None) -> Path:
        """Return the folder in which an attempt prepares its changes; without a number, their parent folder."""
        folder = self.root / "drafts"
        return folder if number is None else folder / f"attempt-{number}"

    @property
    def jobs(self) -> Path:
        """Folder of the Slurm jobs that were submitted for this run."""
        return self.root / "jobs"

    def job(self, id: str) -> Path:
        """Return the path of a job's record."""
        return self.jobs / f"{id}.json"

    def job_script(self, id: str) -> Path:
        """Return the path of a job's script as it was submitted."""
        return self.jobs / f"{id}.sh"

    def job_log(self, id: str) -> Path:
        """Return the path of a job's log: the output of its script and its command, over all restarts."""
        return self.logs / f"slurm-{id}.log"

    def job_ended(self, id: str) -> Path:
        """Return the path of the file to which the job's script appends a line each time the script ends."""
        return self.jobs / f"{id}.ended"

    def job_started(self, id: str) -> Path:
        """Return the path of the file with a line for each start of the job on the run."""
        return self.jobs / f"{id}.started"

    @property
    def stop_request(self) -> Path:
        """File with the request of `ppoctl stop` to the running attempt."""
        return self.root / "stop.json"

    @property
    def steps(self) -> Path:
        return self.root / "steps"

    def step(self, step: int) -> Path:
        return self.steps / f"{step:06d}"

    def stage(self, step: int, stage: str) -> Path:
        """Return the folder of a stage: `10-rollout`, and `10-rollout.2` for the second round of a step."""
        number = NUMBERS.get(stage.partition(".")[0])
        return self.step(step) / (stage if number is None else f"{number:02d}-{stage}")

    def parts(self, step: int, stage: str) -> Path:
        """Return the folder of the finished samples of an unfinished stage."""
        folder = self.stage(step, stage)
        return folder.with_name(f"{folder.name}.parts")

    def all_parts(self, step: int) -> list[Path]:
        """Return all folders of finished samples of a step."""
        return [path for path in folders(self.step(step)) if path.suffix == ".parts"]

    @property
    def states(self) -> Path:
        return self.root / "states"

    def state(self, role: str, step: int) -> Path:
        return self.states / role / f"{step:06d}"

    @property
    def at_stop(self) -> Path:
        """Folder of the states that were in memory when the run was stopped and that belong to no saved step."""
        return self.states / "at-stop"

    @property
    def best(self) -> Path:
        return self.states / "best"

    def best_states(self) -> list[Path]:
        """Return the folders of the best actors. A further folder exists while an actor is being replaced."""
        return [path for path in folders(self.best) if path.name.isdigit()]

    def discarded(self, number: int) -> Path:
        """Return the folder to which an attempt moves discarded artifacts."""
        return self.root / "discarded" / f"attempt-{number}"

    def committed_steps(self) -> list[int]:
        """Return the steps that have a folder, oldest first."""
        return sorted(int(path.name) for path in folders(self.steps) if path.name.isdigit())

    def has_committed(self, step: int) -> bool:
        """Return whether any stage of the step is committed. The step's folder alone does not show this."""
        stages = folders(self.step(step))
        return any((folder / MANIFEST).is_file() for folder in stages if ".attempt-" not in folder.name)

    def saved_states(self) -> list[tuple[str, int]]:
        """Return role and step of every committed state."""
        roles = sorted(path.name for path in folders(self.states) if path not in (self.best, self.at_stop))
        return [(role, step) for role in roles for step in self.saved_steps(role)]

    def saved_steps(self, *roles: str) -> list[int]:
        """Return the steps with a committed state of each of the roles, oldest first."""
        found = [{path.name for path in folders(self.states / role) if (path / MANIFEST).is_file()} for role in roles]
        return sorted(int(name) for name in set.intersection(*found) if name.isdigit())

    def attempts(self) -> list[int]:
        """Return the numbers of all attempts so far, oldest first."""
        entries = [path for parent in (self.logs, self.drafts()) if parent.is_dir() for path in parent.iterdir()]
        names = {path.name.removeprefix("attempt-") for path in entries}
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0: no attempt yet."""
        return max(self.attempts(), default=0)


def folders(parent: Path) -> list[Path]:
    """Return the folders in `parent`; an empty list if `parent` does not exist."""
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
