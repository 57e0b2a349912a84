"""Every path of a run directory; no other file joins paths. Light: the standard library only.

runs/NAME/  recipe.toml  recipe.resolved.json  run.json  journal.jsonl  ledger.jsonl  stop.json
  recipes/000001.json                  the recipe as it holds from that step on
  logs/attempt-3/                      one per process that ran here
  drafts/attempt-3/                    what the newest of them is about to publish; a file for each older one
  jobs/4711.json  jobs/4711.sh         one pair per job of a cluster
  steps/000041/  10-rollout/ 20-reward/ 30-values/ ... 80-eval/     (each: record.safetensors, manifest.json)
  states/actor/000041/  states/critic/000041/  states/best/  states/at-stop/actor/
"""

from dataclasses import dataclass
from pathlib import Path

NUMBERS = {
    "rollout": 10,
    "reward": 20,
    "values": 30,
    "logprobs": 40,
    "correction": 45,
    "advantages": 50,
    "critic_update": 60,
    "actor_update": 70,
    "eval": 80,
}
"""What stands before a stage's name, so that `ls` tells the story; a stage that is not here has its name alone."""

FORMAT = 3
"""The version of everything below, written into run.json and every manifest."""

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
        """Name of a folder of this run for people: `steps/000003/10-rollout`."""
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

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def attempt(self, number: int) -> Path:
        return self.logs / f"attempt-{number}"

    def console_log(self, number: int) -> Path:
        """What an attempt said to whoever typed the command."""
        return self.attempt(number) / "console.log"

    def drafts(self, number: int | None = None) -> Path:
        """Where an attempt prepares what it changes; without a number, the folder of all of them."""
        folder = self.root / "drafts"
        return folder if number is None else folder / f"attempt-{number}"

    @property
    def jobs(self) -> Path:
        """Jobs of a cluster that were submitted for this run."""
        return self.root / "jobs"

    def job(self, id: str) -> Path:
        """What is known of one job."""
        return self.jobs / f"{id}.json"

    def job_script(self, id: str) -> Path:
        """The script as it was submitted."""
        return self.jobs / f"{id}.sh"

    def job_log(self, id: str) -> Path:
        """What a job's script and its command said, over all its restarts."""
        return self.logs / f"slurm-{id}.log"

    def job_ended(self, id: str) -> Path:
        """A line for each time that the job's script ended, as the script itself wrote them."""
        return self.jobs / f"{id}.ended"

    def job_started(self, id: str) -> Path:
        """A line for each time that the job began to work on the run."""
        return self.jobs / f"{id}.started"

    @property
    def stop_request(self) -> Path:
        """What `ppoctl stop` asks of the attempt that is at work."""
        return self.root / "stop.json"

    @property
    def steps(self) -> Path:
        return self.root / "steps"

    def step(self, step: int) -> Path:
        return self.steps / f"{step:06d}"

    def stage(self, step: int, stage: str) -> Path:
        """`10-rollout`, and `10-rollout.2` for the second round of one step."""
        number = NUMBERS.get(stage.partition(".")[0])
        return self.step(step) / (stage if number is None else f"{number}-{stage}")

    def parts(self, step: int, stage: str) -> Path:
        """Finished samples of a stage that is not finished."""
        folder = self.stage(step, stage)
        return folder.with_name(f"{folder.name}.parts")

    def all_parts(self, step: int) -> list[Path]:
        """Whatever such samples a step has."""
        return [path for path in folders(self.step(step)) if path.suffix == ".parts"]

    @property
    def states(self) -> Path:
        return self.root / "states"

    def state(self, role: str, step: int) -> Path:
        return self.states / role / f"{step:06d}"

    @property
    def at_stop(self) -> Path:
        """What was in memory when the run was stopped, and belongs to no saved step."""
        return self.states / "at-stop"

    @property
    def best(self) -> Path:
        return self.states / "best"

    def best_states(self) -> list[Path]:
        """Folders of the best actor: one, or two while the older one is being replaced."""
        return [path for path in folders(self.best) if path.name.isdigit()]

    def discarded(self, number: int) -> Path:
        """Where an attempt sets things aside."""
        return self.root / "discarded" / f"attempt-{number}"

    def committed_steps(self) -> list[int]:
        """Steps that have a folder, oldest first."""
        return sorted(int(path.name) for path in folders(self.steps) if path.name.isdigit())

    def has_committed(self, step: int) -> bool:
        """Whether any stage of the step is committed. Setting aside and kills leave folders without."""
        there = folders(self.step(step))
        return any((folder / MANIFEST).is_file() for folder in there if ".attempt-" not in folder.name)

    def saved_states(self) -> list[tuple[str, int]]:
        """Role and step of every committed state."""
        roles = sorted(path.name for path in folders(self.states) if path not in (self.best, self.at_stop))
        return [(role, step) for role in roles for step in self.saved_steps(role)]

    def saved_steps(self, role: str) -> list[int]:
        """Steps with a committed state of the role, oldest first."""
        there = folders(self.states / role)
        return sorted(int(path.name) for path in there if path.name.isdigit() and (path / MANIFEST).is_file())

    def attempts(self) -> list[int]:
        """Numbers of all attempts so far, oldest first."""
        there = [path for parent in (self.logs, self.drafts()) if parent.is_dir() for path in parent.iterdir()]
        names = {path.name.removeprefix("attempt-") for path in there}
        return sorted(int(name) for name in names if name.isdigit())

    @property
    def newest_attempt(self) -> int:
        """Number of the newest attempt; 0: none yet."""
        return max(self.attempts(), default=0)


def folders(parent: Path) -> list[Path]:
    """The folders in a folder, which may be absent."""
    return [path for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
