"""A run on the real engines, killed and resumed: python -m end_to_end.real_drill FOLDER WHOLE TABLES MOMENTS (JSON),
with tables that replace those of the recipe.

A chain of attempts: each is killed at the next moment on the list, the last one ends the run. Then ledger, final
Megatron states (weights and optimizer, every file) and the metrics of every stage must equal those of the undisturbed
run. That run is in WHOLE; it is made if it does not exist (how often it saves changes none of these). Prints the
moments that were reached.
"""

import json
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path

import ray_forks
from end_to_end.drill import in_a_process, kill_self
from end_to_end.fork_server import preload
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.recipe.schema import Recipe
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

ROOT = Path(__file__).parents[2]
STEPS = 3
MOMENTS = ("starts", "inside", "writing", "written", "renamed")


def real_recipe(*, every_steps: int, **changes: object) -> Recipe:
    quickstart = ROOT / "recipes/quickstart"
    rows = {"format": "gsm8k", "path": str(quickstart / "test.jsonl"), "max_rows": 4}
    tables = {
        "name": "drill",
        "steps": STEPS,
        "model": {"path": str(quickstart / "model"), "dtype": "float32"},
        "data": {"train": {"format": "gsm8k", "path": str(quickstart / "train.jsonl")}, "eval": {"test": rows}},
        "rollout": {
            "prompts_per_step": 8,
            "max_prompt_tokens": 96,
            "max_new_tokens": 24,
            "keep_finished_every_s": 1e-9,
        },
        "reward": {"kind": "gsm8k"},
        "ppo": {"minibatch_seqs": 4, "kl": {"place": "loss", "coef": 0.01}},
        "actor": {"optimizer": {"lr": 1e-3}},
        "critic": {"optimizer": {"lr": 1e-3}},
        "checkpoint": {"every_steps": every_steps},
        "eval": {"every_steps": 2, "at_start": False},
        "tracking": {"kind": "none"},
        "cluster": {"threads": 1},
    }
    return Recipe.model_validate({**tables, **changes})


LONG = ("rollout", "values", "logprobs", "critic_update", "actor_update", "eval")
"""Stages that last long enough to be killed in the middle: each builds or moves a model in a new process."""


class Executioner:
    """Kills the process at one moment, `STEP STAGE MOMENT`; `inside` is milliseconds after a stage has started, or
    halfway through a rollout; `turn` is after the first turn of a rollout. One report of progress may count several
    samples."""

    def __init__(self, moment: str | None) -> None:
        self.moment = moment

    def on_stage(self, step: int, stage: str) -> None:
        if self.moment == f"{step} {stage} starts":
            kill_self()
        if self.moment == f"{step} {stage} inside" and stage != "rollout":
            threading.Timer(0.003, kill_self).start()
        self.at = f"{step} {stage}"

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        if self.moment == f"{step} {stage} {moment}":
            kill_self()

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        if self.at.endswith("rollout") and self.moment == f"{self.at} inside" and done >= total // 2:
            kill_self()
        if self.moment == f"{self.at} turn" and tokens > 0:
            kill_self()

    def on_committed(self, line: JournalLine) -> None:
        pass


def go_on(root: Path, recipe: Recipe, moment: str | None) -> None:
    from ppoctl.run import new_run, session
    from ppoctl.run.run_recipe import recorded_recipes

    paths = RunPaths(root)
    components, digests = session.prepare(recipe, datetime.now())
    if not root.exists():
        new_run.create(paths, recipe, digests, command="train")
    recipes = recorded_recipes(RecordedRun(paths))
    session.attempt_run(
        session.OpenedRun(paths, recipes, components, plan_resume(RecordedRun(paths)), (Executioner(moment),))
    )


def drill(root: Path, recipe: Recipe, moments: list[str]) -> list[str]:
    """Kill at each moment in turn, then end the run; return the moments that were reached. Two engines and one
    generate in turn, at last one: their number changes no sample."""
    parts = [_with_engines(recipe, 1 + left % 2) for left in range(len(moments), -1, -1)]
    attempts = zip(parts, moments, strict=False)
    reached = [m for its, m in attempts if in_a_process(lambda its=its, m=m: go_on(root, its, m)) == signal.SIGKILL]
    assert in_a_process(lambda: go_on(root, parts[-1], None)) == 0
    return reached


def _with_engines(recipe: Recipe, count: int) -> Recipe:
    table = recipe.generator.model_copy(update={"engines_per_gpu": count, "kv_cache_mib": 64 * count})
    return recipe.model_copy(update={"generator": table})


def outcome(root: Path) -> dict[str, object]:
    paths = RunPaths(root)
    states = {}
    for role in RecordedRun(paths).outlines.roles:
        manifest = manifests.read(paths.state(role, STEPS))
        assert manifest is not None
        # `.metadata` is torch's index of the tensor files; it may differ between processes, the tensor files must
        # not.
        files = {name: digest.sha256 for name, digest in manifest.files.items() if name != ".metadata"}
        states[role] = (manifest.identity, files)
    stages = [line for line in read_lines(paths.journal) if "stage" in line]
    assert len({(line["step"], line["stage"]) for line in stages}) == len(stages)
    metrics = {f"{line['step']} {line['stage']}": line["figures"] for line in stages}
    ledger = [json.loads(line) for line in paths.ledger.read_text().splitlines()]
    return {"states": states, "figures": metrics, "ledger": ledger}


def moments_of_the_grid(every_steps: int) -> list[str]:
    """Return every moment of every stage and state of the run, in order, for synchronous saves."""
    grid: list[str] = []
    for step in range(1, STEPS + 1):
        stages = [*trace(PPO).outline.names, *(["eval"] if step in (2, 3) else [])]
        grid += [
            f"{step} {stage} {moment}"
            for stage in stages
            for moment in MOMENTS
            if moment != "inside" or stage in LONG
        ]
        if step % every_steps == 0:
            grid += [f"{step} state/{role} {moment}" for role in ("critic", "actor") for moment in MOMENTS[2:]]
    return grid


def main(folder: Path, whole_run: Path, tables: dict[str, object], moments: list[str]) -> None:
    preload()  # the imports cost more than a whole attempt; nothing computes in this process
    ray_forks.start()
    ray_forks.show_ray()
    recipe = real_recipe(every_steps=1, **tables)
    if not whole_run.exists():
        drill(whole_run, recipe, [])
    reached = drill(folder / "killed", recipe, moments)
    killed, whole = outcome(folder / "killed"), outcome(whole_run)
    for part in whole:
        assert killed[part] == whole[part], f"{part} differ:\n{killed[part]}\n{whole[part]}"
    print(json.dumps(reached))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
