"""An attempt that ran out of memory names the setting to lower, stage by stage."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fakes.components import fake_components, fake_recipe
from fakes.job import Witness
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.core.errors import OutOfMemoryError
from ppoctl.run import new_run, session
from ppoctl.run.given_resources import out_of_memory
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

LIMITS = {"max_tokens_per_microbatch": 600, "forward_max_tokens_per_microbatch": 1000}
TRAINED = {"optimizer": {"lr": 1.0}, "batching": LIMITS}
ON_HOST, ON_DEVICE = MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
LOWER = {
    "start": "generator.kv_cache_mib=128",
    "rollout": "generator.kv_cache_mib=128",
    "reward": None,
    "values": "critic.batching.forward_max_tokens_per_microbatch=500",
    "logprobs": "actor.batching.forward_max_tokens_per_microbatch=500",
    "advantages": None,
    "critic_update": "critic.batching.max_tokens_per_microbatch=300",
    "actor_update": "actor.batching.max_tokens_per_microbatch=300",
    "eval": "generator.kv_cache_mib=128",
}
"""Stage -> the setting in the hint; None if no key bounds what the stage takes."""


@dataclass
class Full(Witness):
    """Runs out of memory when a stage starts."""

    fails_in: str = ""
    error: BaseException = ON_HOST

    def on_stage(self, step: int, stage: str) -> None:
        if stage == self.fails_in:
            raise self.error


def raised(folder: Path, stage: str, error: BaseException) -> OutOfMemoryError:
    recipe, layout = fake_recipe(actor=TRAINED, critic=TRAINED), RunPaths(folder / "a run")
    new_run.create(layout, recipe, {"model": "a" * 64, "data": "b" * 64}, command="train")
    components = fake_components(recipe)
    opened = session.OpenedRun(
        layout, {1: recipe}, components, plan_resume(RecordedRun(layout)), (Full(fails_in=stage, error=error),)
    )

    def begin(job: object) -> None:
        raise error

    with pytest.raises(OutOfMemoryError) as caught:
        session.attempt_run(opened, **({"do": begin} if stage == "start" else {}))
    assert read_lines(layout.journal)[-1]["exit_code"] == 7
    return caught.value


@pytest.mark.parametrize("stage", LOWER)
def test_out_of_memory_hint_halves_the_limit_of_the_stage(tmp_path: Path, stage: str) -> None:
    found, step = raised(tmp_path, stage, ON_HOST), 0 if stage in ("start", "eval") else 1
    assert found.message == f"out of memory in stage `{stage}` of step {step}: the host has no more memory"
    command, _, why = str(found.hint).partition("  # ")
    settings = f" --set {LOWER[stage]}" if LOWER[stage] else ""
    assert command == f"ppoctl resume '{tmp_path}/a run'{settings}"
    assert why.startswith("everything before it is committed")


@pytest.mark.parametrize("most", [1, 2, 3])
def test_suggested_microbatch_has_at_least_one_sequence(tmp_path: Path, most: int) -> None:
    batching = {"microbatch_seqs": most, "forward_microbatch_seqs": 7}
    recipe = fake_recipe(critic={"optimizer": {"lr": 1.0}, "batching": batching})
    for stage, setting in (("critic_update", "microbatch_seqs=1"), ("values", "forward_microbatch_seqs=3")):
        error = out_of_memory(tmp_path / "run", recipe, trace(PPO).outline, (1, stage), ON_HOST)
        assert f" --set critic.batching.{setting}  # " in str(error.hint)


def test_engine_out_of_memory_lowers_its_gpu_fraction(tmp_path: Path) -> None:
    found = raised(tmp_path, "rollout", ON_DEVICE)
    assert found.message == "out of memory in stage `rollout` of step 1: CUDA out of memory. Tried"
    assert " --set generator.gpu_memory_frac=0.3  # " in str(found.hint)
