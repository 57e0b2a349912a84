"""`eval`: the order in which it opens its inputs; all ways to one actor give the same evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fakes.components
from fakes.bigram import BigramTrainer
from fakes.components import BigramGenerator, CountingPrompts, fake_components, fake_recipe
from fakes.job import play
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import Evaluation, State
from ppoctl.core.errors import RewardError
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import Recipe
from ppoctl.run import eval_target, run_commands
from ppoctl.run.eval_target import Checkpoint
from ppoctl.run.wire import engines
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RunPaths

SAVED = Manifest("state/actor", 2, "lineage", (), "", {}, 0.0, 0.0, 1, extra={"updates": 4})


@pytest.mark.parametrize("saved", [None, SAVED], ids=["the model source", "a saved state"])
def test_actor_state_is_loaded_once_on_generator_request(saved: Manifest | None) -> None:
    recipe, order = fake_recipe(), list[str]()
    components = fake_components(recipe)

    class Recording(BigramTrainer):
        def start(self) -> None:
            order.append("actor starts")
            super().start()

        def load(self, folder: Path) -> None:
            order.append(f"actor loads {folder}")
            super().start()

    class Starting(BigramGenerator):
        def prepare(self, state: State) -> None:
            order.append("generator prepares")
            super().prepare(state)

    trainers = {"actor": Recording("actor")}
    components = replace(components, trainers=trainers, generator=lambda actor_at, *_: Starting(actor_at))
    sets = components.prompts.evaluation_sets()
    found = run_commands.evaluated(Checkpoint(recipe, Path("states"), saved), components, sets, print)
    assert found.metrics
    assert found.stamp.startswith("actor@0:" if saved is None else "actor@2:lineage")
    assert order[:2] == ["generator prepares", "actor starts" if saved is None else "actor loads states"]
    assert sum(line.startswith("actor") for line in order) == 1


GSM8K = {"kind": "gsm8k"}


def test_metric_function_is_checked_before_engines_start() -> None:
    function = Path(__file__).parents[1] / "rewards" / "users_metrics.py"
    no_rows: Any = SimpleNamespace(rows={})
    must_not_be_called: Any = None
    with pytest.raises(RewardError, match="has no `missing`"):
        engines.open_scorer(fake_recipe(eval={"metrics": f"{function}:missing"}), no_rows, must_not_be_called)


class TwoSets(CountingPrompts):
    """One set more than a fake run has."""

    def evaluation_sets(self) -> dict[str, Prompts]:
        return {**super().evaluation_sets(), "far": self.prompts_for(9)}


class FromFolder(BigramTrainer):
    """An actor whose model source is a folder that `save_weights` wrote."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__("actor")
        self.folder = Path(recipe.model.path)

    def start(self) -> None:
        super().start()
        table = torch.frombuffer(bytearray((self.folder / "table.bin").read_bytes()), dtype=torch.float32)
        self.table = table.reshape(self.table.shape).clone()


@pytest.mark.parametrize("checkpoint", ["run", "state", "export"])
def test_run_state_and_export_get_the_same_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    monkeypatch.setattr(fakes.components, "CountingPrompts", TwoSets)
    monkeypatch.setattr(eval_target, "same_companions", lambda *_: None)
    rows = {"format": "gsm8k", "path": "none"}
    table = {"samples_per_prompt": 2, "top_k": 3, "pass_at": [2]}
    recipe = fake_recipe(data={"train": rows, "eval": {"held": rows, "far": rows}}, eval=table, reward=GSM8K)
    layout, export = RunPaths(tmp_path / "run"), tmp_path / "export"
    play(layout.root, recipe)
    layout.recipe_toml.write_text(recipe_as_toml(recipe))
    export.mkdir()
    (export / "config.json").write_text("{}")
    trained = BigramTrainer("actor")
    trained.load(layout.state("actor", 3))
    trained.save_weights(export)
    place = {"run": layout.root, "state": layout.state("actor", 3), "export": export}[checkpoint]
    found = eval_target.find_checkpoint(place, [layout.recipe_toml] if checkpoint == "export" else [], [])
    components = fake_components(found.recipe)
    components = replace(components, trainers={"actor": FromFolder(found.recipe)})
    evaluated: Evaluation = run_commands.evaluated(found, components, components.prompts.evaluation_sets(), print)
    samples = (layout.stage(3, "eval") / "samples.jsonl").read_text().splitlines()
    assert [dict(row) for row in evaluated.rows] == [json.loads(line) for line in samples]
    assert {name.split("/")[1] for name in evaluated.metrics()} == {"held", "far"}
    before = [json.loads(line) for line in (layout.stage(0, "eval") / "samples.jsonl").read_text().splitlines()]
    assert [row["response"] for row in before] != [row["response"] for row in evaluated.rows]
