"""A critic with its own model, from the command line: of another family, size and dtype, then from a run's saved
state, in one process and in two."""

import json
from pathlib import Path

import pytest

from end_to_end.cli_process import Forked
from end_to_end.real_drill import ROOT, real_recipe
from end_to_end.test_families import tiny_model
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.minutes(1.5), pytest.mark.timeout(600)]


def first_values(paths: RunPaths) -> float:
    """Return the mean value of the first step, before any update."""
    lines = read_lines(paths.journal)
    [line] = [line for line in lines if line.get("stage") == "critic_update" and line["step"] == 1]
    mean: float = line["figures"]["value/value_mean"]
    return mean


def test_critic_of_another_model_trains_and_starts_a_second_run(tmp_path: Path, forked: Forked) -> None:
    model = {"path": str(ROOT / "recipes/quickstart/model"), "dtype": "float32"}
    small = {"path": str(tiny_model("llama", tmp_path / "small")), "dtype": "bfloat16"}
    for name, own in (("first", small), ("second", {"path": str(tmp_path / "runs/first/states/critic/000002")})):
        recipe = real_recipe(every_steps=2, name=name, model={**model, "critic": own})
        (tmp_path / f"{name}.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
        layout = ["--set", "critic.parallel={data=2}"] if name == "second" else []
        forked.succeeds(tmp_path, "train", f"{name}.toml", "--set", "steps=2", *layout)
    first, second = (RunPaths(tmp_path / "runs" / name) for name in ("first", "second"))
    assert first_values(first) == 0.0
    assert first_values(second) != 0.0
    config = json.loads((first.state("critic", 2) / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["hidden_size"], config["dtype"]) == ("llama", 64, "bfloat16")
    source = RecordedRun(second).facts["critic_from"]
    saved = manifests.read(first.state("critic", 2))
    assert saved is not None
    assert (source["run"], source["step"], source["lineage"]) == (str(first.root), 2, saved.identity)
    for name in ("first", "second"):
        forked.succeeds(tmp_path, "resume", f"runs/{name}", "--set", "steps=3")
        assert RunPaths(tmp_path / "runs" / name).saved_steps("critic")[-1] == 3
