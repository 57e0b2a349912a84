"""Checks that run once the model's folder is known."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fakes.components import EvenScorer, fake_components, fake_recipe
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import RewardError
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.ray.groups_of_processes import RayProcesses
from ppoctl.plan.memory import driver
from ppoctl.recipe.loading.load import load
from ppoctl.rewards.probe import ProbeRow
from ppoctl.run.wire import engines, placed_processes
from ppoctl.run.wire.engines import build_engines, encoder, place_roles
from ppoctl.run.wire.prestart import cpu_threads, vllm_settings

RECIPES = Path(__file__).parents[2] / "recipes"


def test_deadlines_apply_to_their_calls() -> None:
    written = ["cluster.update_deadline_s=7", "cluster.draw_deadline_s=5"]
    recipe = load([RECIPES / "quickstart.toml"], written).recipe
    assert placed_processes._deadlines(recipe) == {
        "advance": (5.0, "cluster.draw_deadline_s"),
        "update": (7.0, "cluster.update_deadline_s"),
    }
    every = ["update", "draw", "forward", "save"]
    written = [f"cluster.{name}_deadline_s={number}" for number, name in enumerate(every, start=1)]
    found = placed_processes._deadlines(load([RECIPES / "quickstart.toml"], written).recipe)
    assert {method: deadline.seconds for method, deadline in found.items()} == {
        "update": 1.0,
        "advance": 2.0,
        **dict.fromkeys(("forward", "reference_forward", "scores"), 3.0),
        **dict.fromkeys(("begin_save", "finish_save"), 4.0),
    }
    # Ranks wait for each other longer than the driver waits for them.
    assert trainer_settings(recipe, "actor").collective_s > 3600
    longer = load([RECIPES / "quickstart.toml"], ["cluster.update_deadline_s=9000"]).recipe
    assert trainer_settings(longer, "actor").collective_s > 9000


def test_only_listed_roles_offload_and_ray_has_the_planned_store() -> None:
    sets = ["generator.engines=2", "cluster.offload=['generator']", "rollout.prompts_per_step=1000000"]
    recipe = load([RECIPES / "quickstart.toml"], sets).recipe
    placed, left = place_roles(recipe), list[str]()
    for role in ("actor", "generator", "critic", "generator", "actor"):
        placed.trained["actor"].sharing.acquire(role, lambda role=role: left.append(role))
    assert placed.trained["critic"].sharing is placed.trained["actor"].sharing
    assert left == ["generator", "generator"]
    assert placed.close.__self__._object_store_bytes == driver.object_store_bytes(recipe)


def test_each_engine_has_its_own_devices() -> None:
    recipe = load([RECIPES / "quickstart.toml"], ["generator.engines=3", "generator.tensor=2"]).recipe
    settings = vllm_settings(recipe, Path(recipe.model.path))
    assert settings.trained == ("actor", "critic")  # the hint of a full GPU names them
    side = place_roles(recipe).generator(settings, print)
    groups = [engine.group for engine in side.engines if isinstance(engine, RayProcesses)]
    assert [(group.first, group.size) for group in groups] == [(0, 2), (2, 2), (4, 2)]


@pytest.mark.parametrize(("written", "threads"), [(3, 3), (1, 1)])
def test_cpu_threads_are_read_from_the_recipe(written: int, threads: int) -> None:
    assert cpu_threads(load([RECIPES / "quickstart.toml"], [f"cluster.threads={written}"]).recipe) == threads


def test_initial_lineage_depends_on_the_models_and_the_role_dtype() -> None:
    sets = ["generator.engines=2", "model.dtype=float32"]  # two engines: nothing is started in this process

    def digests(*more: str) -> Mapping[str, str]:
        recipe = load([RECIPES / "quickstart.toml"], [*sets, *more]).recipe
        placed = place_roles(recipe)
        return build_engines(recipe, Mock(counts={}), Mock(), placed, {"model": "files"}).source_digests

    base = load([RECIPES / "quickstart.toml"]).recipe.model.path
    assert digests() == {"actor": "files:float32", "critic": "files:float32"}
    assert digests(f"model.critic={{path='{base}', dtype='bfloat16'}}") == {
        "actor": "files:float32",
        "critic": "files:bfloat16",
    }


def test_reward_trial_encodes_responses_with_end_tokens() -> None:
    encode = encoder(load([RECIPES / "quickstart.toml"]).recipe)
    whole, cut = encode("1+2=3", "terminated"), encode("1+2=3", "truncated")
    assert (len(cut), whole) == (5, (*cut, 1))
    assert encode("", "terminated") == (1,)


@pytest.mark.parametrize(("name", "other"), [("length", "my_length"), ("shaped", "my_shaped"), ("a b!", "my_a_b")])
def test_scorer_extra_with_a_reserved_name_is_refused(name: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_with(*extras: str) -> object:
        tried = ProbeRow("a", None, {"short": ""}, {"short": Score(1.0, "ok", extras=dict.fromkeys(extras, 1.0))})
        monkeypatch.setattr(engines, "opened_and_probed", lambda *_: nullcontext(("scorer", [tried])))
        return engines.open_scorer(fake_recipe(), Mock(rows={}), Mock())

    with pytest.raises(RewardError, match=f"returns a metric `{name}` in addition to its score") as caught:
        opened_with(name)
    assert (caught.value.hint or "").endswith(f"such as `{other}`")
    assert opened_with("right", "lenient", "style_length") == "scorer"


def test_scorer_is_closed_if_trainers_fail_to_close() -> None:
    closed: list[str] = []

    class Scoring(EvenScorer):
        def close(self) -> None:
            closed.append("scorer")

    def fail() -> None:
        closed.append("trainers")
        raise RuntimeError("an engine is stuck")

    with pytest.raises(RuntimeError, match="stuck"):
        replace(fake_components(fake_recipe()), scorer=Scoring(), close_trainers=fail).close()
    assert closed == ["trainers", "scorer"]


@pytest.mark.parametrize(
    ("colocated", "has_gpus", "early"),
    [
        (True, True, ["engine prepares"]),
        (True, False, ["engine starts", "ranks start"]),
        (False, True, ["engine starts", "ranks start"]),
        (False, False, ["engine starts", "ranks start"]),
    ],
)
def test_engines_on_shared_gpus_only_prepare_and_other_processes_start_in_parallel(
    colocated: bool, has_gpus: bool, early: list[str]
) -> None:
    """On a shared GPU an engine measures free memory when it starts, so it may not start in parallel. Ray must be up
    before its GPUs are queried."""
    events = list[str]()

    def gpus() -> bool:
        assert events == ["up"]
        return has_gpus

    cluster: Any = SimpleNamespace(
        placement=SimpleNamespace(colocated=colocated), start=lambda: events.append("up"), has_gpus=gpus
    )
    engine: Any = SimpleNamespace(
        prestart=lambda: events.append("engine starts"), prepare=lambda: events.append("engine prepares")
    )
    ranks: Any = SimpleNamespace(prestart=lambda: events.append("ranks start"))
    placed_processes._prestart(cluster, [engine], [ranks])
    assert events == ["up", *early]
