"""Every request of every stage that generates has the sampling keys of the recipe, and the trainer scores the same
distribution."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_components, fake_recipe
from fakes.job import BuiltStages, Witness, open_run
from ppoctl.algorithms.choose import trace_at
from ppoctl.algorithms.evaluation_table import EvalTable
from ppoctl.algorithms.rollout_table import RolloutTable
from ppoctl.core.ports import OutputRequest, SamplingParams
from ppoctl.recipe.schema import Recipe
from wire.test_chosen_stages import PARTS, STEPS, tables_of
from wiring.harness import LoggedGenerator

ROLLOUT: Mapping[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 7, "min_p": 0.02, "max_new_tokens": 25, "min_new_tokens": 2,
    "stop_strings": ("7 3",), "stop_token_ids": (2, 5), "special_tokens": "drop", "max_window_tokens": 37,
}  # fmt: skip
EVAL: Mapping[str, Any] = {"temperature": 0.6, "top_p": 0.8, "top_k": 5, "min_p": 0.05, "max_new_tokens": 24}
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": None, "min_p": 0.0}
SIZES = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4}
SUM = {"kind": "python", "path": "env:Sum", "turns": 3, "tokens": 30}
REQUESTS: Mapping[str, SamplingParams] = {
    "rollout": SamplingParams(**ROLLOUT, returns_experts=True),
    "greedy_rollout": SamplingParams(**{**ROLLOUT, **GREEDY}),
    "eval sampled": SamplingParams(**{**ROLLOUT, **EVAL, "min_new_tokens": 0}),
    "eval greedy": SamplingParams(**{**ROLLOUT, **EVAL, **GREEDY, "min_new_tokens": 0}),
}


def test_every_sampling_key_has_another_value_than_its_default() -> None:
    of_recipe = {"prompts_per_step", "samples_per_prompt", "max_prompt_tokens", "groups", "keep_finished_every_s"}
    of_recipe |= {"ahead", "tokens_per_step", "accept_stale"}
    assert RolloutTable.model_fields.keys() - of_recipe == ROLLOUT.keys()
    assert ROLLOUT.keys() == {f.name for f in fields(SamplingParams)} - {"returns_experts"}
    assert EvalTable.model_fields.keys() & ROLLOUT.keys() == EVAL.keys()
    for table, values in ((RolloutTable, ROLLOUT), (EvalTable, EVAL)):
        assert all(table.model_fields[key].default != value for key, value in values.items())


@pytest.mark.parametrize("environment", [None, SUM], ids=["one turn", "episodes"])
def test_every_request_has_the_sampling_keys_of_the_recipe(
    tmp_path: Path, environment: dict[str, Any] | None
) -> None:
    ppo = {"minibatch_seqs": 4, "advantages": {"kind": "remax"}}
    tables = {"rollout": {**SIZES, **ROLLOUT}, "eval": EVAL, "ppo": ppo, "environment": environment}
    tables["actor"] = {"optimizer": {"lr": 0.05}, "router_replay": "generator"}
    recipe, made = fake_recipe(**tables, critic=None), list[LoggedGenerator]()

    def generator(actor_at: Any, *_: Any) -> LoggedGenerator:
        made.append(LoggedGenerator(actor_at))
        return made[0]

    components = fake_components(recipe)
    object.__setattr__(components, "generator", generator)
    job = open_run(tmp_path / "run", recipe, Witness(), components=components).job
    stages: Any = BuiltStages(job, 1)
    actor, continued = job.states.initial["actor"], set[str]()
    for stage, inputs in (("rollout", [job.prompts(1)]), ("greedy_rollout", [job.prompts(1)]), ("eval", [])):
        made[0].requests.clear()
        getattr(stages, stage).run(actor, *inputs)
        assert made[0].requests
        for request, params, _ in made[0].requests:
            name = f"eval {request.key.split('/')[1]}" if stage == "eval" else stage
            assert params == REQUESTS[name], name
            assert environment is None or request.is_continued == (not request.key.endswith("/1"))
            continued |= {name} if request.is_continued else set()
    assert continued >= (set() if environment is None else {"rollout", "eval sampled"})


@pytest.mark.parametrize("name", STEPS)
def test_trainer_scores_the_distribution_of_the_recipe(name: str) -> None:
    recipe = Recipe.model_validate(
        tables_of({**STEPS[name], **{f"rollout.{key}": value for key, value in ROLLOUT.items()}})
    )
    shared = {field.name for field in fields(OutputRequest)} & ROLLOUT.keys()
    assert len(shared) == 6
    for stage in ("logprobs", "actor_update"):
        if stage in trace_at(recipe, 2):
            scored: Any = trace_at(recipe, 2)[stage].build(recipe, PARTS).scored  # type: ignore[attr-defined]
            assert {key: getattr(scored, key) for key in shared} == {key: ROLLOUT[key] for key in shared}
            assert scored.values == (name == "value head" and stage == "actor_update")
