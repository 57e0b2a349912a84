"""Runs of a shipped recipe on a device that counts bytes (`fakes.device`), compared with `plan`'s bytes of each
stage."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fakes.components import CountingPrompts, EvenScorer, fake_components, fake_recipe
from fakes.device import (
    CountedDevice,
    CountedGenerator,
    CountedScorer,
    CountedTrainer,
    CountingEngine,
    CountingRank,
    CountingRewardRank,
)
from fakes.job import Stops, Witness, open_run
from ppoctl.algorithms.role_model import reward_models
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.errors import PreemptedError
from ppoctl.core.key_path import dotted
from ppoctl.engines.megatron.ranks import DeviceSharingRanks, ThisProcess
from ppoctl.engines.megatron.trainer import trainer_side
from ppoctl.engines.vllm.fleet import Fleet
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.device_sharing import DeviceSharing
from ppoctl.engines.weights.sync import EngineSide, Sync
from ppoctl.plan.memory.estimate import Memory, estimate_here
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import leaving
from ppoctl.recipe.schema import Recipe
from ppoctl.run.eval_target import Checkpoint
from ppoctl.run.loop.steps import run
from ppoctl.run.run_commands import evaluated
from ppoctl.run.wire.components import Components
from ppoctl.store import manifest as manifests

RECIPES = Path(__file__).parents[2] / "recipes"
USABLE_GIB = {"80g": 80.0, "32g": 31.0, "24g": 22.5}
"""Usable memory of a card, by its nominal size."""
_ALWAYS = ("CUDA contexts", "NCCL", "NCCL for weights", "CUDA graphs", "gather buffer")
"""Suffixes of the plan's items that are always on the device."""
_PLAYED: dict[str, dict[str, Any]] = {
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6},
    "ppo": {"minibatch_seqs": 4},
    "eval": {"every_steps": 1, "at_start": True},
    "checkpoint": {"every_steps": 2},
}
"""Changes for playing a recipe: two steps of the bigram model. Each is evaluated, the second is saved."""


class Killed(BaseException):
    """Stand-in for SIGKILL within this process."""


class FewPrompts(CountingPrompts):
    """Prompts, and evaluation sets with the names of the recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe.rollout.prompts_per_step)
        self.names = tuple(recipe.data.eval)

    def evaluation_sets(self) -> dict[str, Prompts]:
        [found] = super().evaluation_sets().values()
        return dict.fromkeys(self.names, found)


@dataclass(frozen=True)
class Harness:
    """A recipe as it is planned, and as it is played."""

    recipe: Recipe
    played: Recipe
    memory: Memory

    @classmethod
    def of(cls, name: str, gpu_gib: float, *sets: str) -> "Harness":
        recipe = load([RECIPES / f"{name}.toml"], sets, {"PPOCTL_DATA": "/data"}).recipe
        changes = {table: getattr(recipe, table).model_copy(update=keys) for table, keys in _PLAYED.items()}
        if recipe.environment is not None:  # most episodes on fakes are truncated, and some environments fail
            changes["ppo"] = changes["ppo"].model_copy(update={"truncated": "terminal"})
        any_errors = fake_recipe().reward.model_copy(update={"max_error_frac": 1.0})
        reward = recipe.reward if reward_models(recipe) else any_errors
        played = recipe.model_copy(update={**changes, "steps": 2, "reward": reward})
        memory = estimate_here(recipe, gpu_gib)
        assert memory is not None
        return cls(recipe, played, memory)

    @property
    def planned(self) -> dict[str, int]:
        """Bytes by stage, of the fullest GPU."""
        [gpu] = self.memory.places
        return {stage.stage: stage.bytes for stage in gpu.stages}

    def device(self) -> CountedDevice:
        [gpu] = self.memory.places
        return CountedDevice(sum(item.bytes for item in gpu.items if item.name.endswith(_ALWAYS)))

    def components(self, device: CountedDevice, witness: Witness | None = None) -> Components:
        """Return components on this device that are not started yet."""
        memory, sharing = self.memory, DeviceSharing(leaving(self.recipe))
        buckets, observer = memory.sending.buckets, witness or Witness()

        def trainer(role: str) -> CountedTrainer:
            rank = CountingRank(device, role, memory.roles[role].ranks[0], buckets)
            ranks = DeviceSharingRanks(ThisProcess(rank), role, sharing)
            has_head = role == "actor" and self.recipe.value_head is not None
            return CountedTrainer(role, ranks, rank, observer.on_minibatch, value_head=has_head)

        trainers = {role: trainer(role) for role in self.recipe.trained}
        scorer = EvenScorer()
        for role in map(dotted, reward_models(self.recipe)):
            own = CountingRewardRank(device, role, memory.scoring[role].ranks[0])
            scorer = CountedScorer(DeviceSharingRanks(ThisProcess(own), role, sharing))
        engine = CountingEngine(device, memory.generator.weights + memory.generator.kv_cache, buckets)
        side = EngineSide([engine], list, sharing=sharing)
        canary = Canary.of("float32", max_model_len=64, tolerance=None)
        return replace(
            fake_components(self.played),
            trainers=trainers,
            generator=lambda actor_at, *_: CountedGenerator(
                Fleet(side, Sync(trainer_side(trainers["actor"], actor_at), side, canary), 8, print), engine
            ),
            scorer=scorer,
            prompts=FewPrompts(self.played),
        )

    def play(self, root: Path, witness: Witness | None = None, gate: Stops | None = None) -> CountedDevice:
        """Run to the end, a stop or a kill, as in a separate process; return its device."""
        device = self.device()
        witness = witness or Witness()
        on_stage = witness.on_stage

        def named(step: int, stage: str) -> None:
            device.stage = stage
            on_stage(step, stage)

        witness.on_stage = named  # type: ignore[method-assign]
        wiring = open_run(root, self.played, witness, gate=gate, components=self.components(device, witness))
        with suppress(Killed, PreemptedError):
            run(wiring.job)
        return device


def kills_at(*moments: str) -> Witness:
    """Return a witness that kills the run at the last of these moments, after the others have passed in order."""
    left = list(moments)

    def act(_: int, name: str) -> None:
        if left and name == left[0]:
            left.pop(0)
            if not left:
                raise Killed

    return Witness(act=act)


def train(harness: Harness, root: Path) -> CountedDevice:
    """Train; the evaluation comes first."""
    return harness.play(root)


def resume_into_an_evaluation(harness: Harness, root: Path) -> CountedDevice:
    """Resume a run that a stop within the first step's evaluation ended, with the actor saved."""
    harness.play(root, gate=Stops(lambda gate: gate.at == (1, "eval") and gate.between_calls > 2))
    assert list((root / "states/at-stop").glob("actor/manifest.json"))
    return harness.play(root)


def resume_after_a_kill_in_actor_update(harness: Harness, root: Path) -> CountedDevice:
    """Resume a run killed in the second step's update: the first update is replayed, and an evaluation follows."""
    harness.play(root, kills_at("2 actor_update starts", "inside actor_update after a minibatch"))
    return harness.play(root)


def resume_after_a_kill_in_an_evaluation(harness: Harness, root: Path) -> CountedDevice:
    """Resume a run whose first update is committed: the evaluation itself replays it."""
    harness.play(root, kills_at("1 eval starts"))
    return harness.play(root)


def resume_into_log_probs(harness: Harness, root: Path) -> CountedDevice:
    """Resume in a stage that only reads the actor, which must be restored for it."""
    harness.play(root, kills_at("2 logprobs starts"))
    return harness.play(root)


def eval_alone(harness: Harness, root: Path) -> CountedDevice:
    """Run `ppoctl eval` of a saved state, as in a separate process."""
    harness.play(root)
    folder = root / "states" / "actor" / "000002"
    device = harness.device()
    device.stage = "eval"
    components = harness.components(device)
    found = Checkpoint(harness.played, folder, manifests.require(folder))
    evaluated(found, components, components.prompts.evaluation_sets(), print)
    return device


SITUATIONS: dict[str, Callable[[Harness, Path], CountedDevice]] = {
    "train": train,
    "resume into an evaluation": resume_into_an_evaluation,
    "after a kill in actor_update": resume_after_a_kill_in_actor_update,
    "after a kill in an evaluation": resume_after_a_kill_in_an_evaluation,
    "resume into log-probs": resume_into_log_probs,
    "eval alone": eval_alone,
}


def names() -> list[str]:
    """Return ppoctl's own recipes, and the recipe for 64 GPUs."""
    return [*(f"own/{file.stem}" for file in sorted((RECIPES / "own").glob("*.toml"))), "dsr1-7b"]


def usable_gib(name: str) -> float:
    """Return the memory of the GPU in the recipe's name."""
    return next((gib for mark, gib in USABLE_GIB.items() if name.endswith(mark)), 80.0)
