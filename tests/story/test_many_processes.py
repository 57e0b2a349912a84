"""A run whose actor and critic are several processes each: killed, resumed, laid out anew."""

from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from ppoctl.batch.records import Rollouts
from ppoctl.recipe.write import recipe_as_toml
from ppoctl.store import manifest as manifests
from ppoctl.store.layout import RunLayout
from ppoctl.store.once import load_record
from story.real_drill import outcome, real_recipe
from story.typed import Forked

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

LAYOUT = {
    "actor": {"optimizer": {"lr": 1e-3}, "parallel": {"tensor": 2, "sequence": True}},
    "critic": {"optimizer": {"lr": 1e-3}, "parallel": {"data": 2, "distributed_optimizer": True}},
}


def write_recipe(folder: Path, name: str, **changes: object) -> str:
    file = folder / f"{name}.toml"
    checkpoint = {"every_steps": 1, "keep_rollouts_every_steps": 1}
    recipe = real_recipe(every_steps=1, name=name, checkpoint=checkpoint, **changes)
    file.write_text(recipe_as_toml(recipe), encoding="utf-8")
    return str(file)


def first_tokens(folder: Path) -> Tensor:
    """Of the first step's rollouts."""
    layout = RunLayout(folder)
    manifest = manifests.read(layout.stage(1, "rollout"))
    assert manifest is not None
    rollouts = load_record(layout, 1, "rollout", manifest)
    assert isinstance(rollouts, Rollouts)
    return rollouts.tokens


def ranks_of(pid: int) -> list[psutil.Process]:
    """The processes of actor and critic under a command."""
    return [child for child in psutil.Process(pid).children(recursive=True) if "_Rank" in " ".join(child.cmdline())]


def test_a_rank_is_killed_and_the_run_ends_as_if_it_had_not_been(tmp_path: Path, forked: Forked) -> None:
    whole = forked(tmp_path, "train", write_recipe(tmp_path, "whole", **LAYOUT))
    assert whole.returncode == 0, whole.stderr

    with forked.running(tmp_path, "train", write_recipe(tmp_path, "killed", **LAYOUT)) as running:
        for line in running.stderr:
            if line.startswith("step 1/3"):
                ranks = ranks_of(running.pid)
                assert len(ranks) == 4  # two of the actor, two of the critic
                ranks[0].kill()
                break
        said = running.stderr.read()
    assert running.returncode == 3
    assert "died during" in said
    assert "ppoctl resume" in said
    assert not any(psutil.pid_exists(rank.pid) for rank in ranks)
    resumed = forked(tmp_path, "resume", "runs/killed")
    assert resumed.returncode == 0, resumed.stderr
    killed, expected = outcome(tmp_path / "runs/killed"), outcome(tmp_path / "runs/whole")
    assert killed["ledger"] == expected["ledger"]
    assert killed["figures"] == expected["figures"]

    # The tokens of the first step are those of one process, and the last state goes on in another layout.
    alone = forked(tmp_path, "rollout", write_recipe(tmp_path, "alone"))
    assert alone.returncode == 0, alone.stderr
    assert torch.equal(first_tokens(tmp_path / "runs/alone"), first_tokens(tmp_path / "runs/whole"))
    layout = ["--set", "actor.parallel={pipeline=2}", "--set", "critic.parallel={data=1,distributed_optimizer=true}"]
    longer = forked(tmp_path, "resume", "runs/killed", "--set", "steps=4", *layout)
    assert longer.returncode == 0, longer.stderr
    assert "restored actor at step 3" in longer.stderr
