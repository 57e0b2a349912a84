"""Stage specs declare exactly what stages commit: fields, dtypes, axes and metrics of every record, on many
recipes and for every test algorithm."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.algorithms.every import EVERY, Algorithm
from fakes.components import fake_recipe
from fakes.job import play
from ppoctl.algorithms.choose import step_function_at, trace_at
from ppoctl.algorithms.stage_spec import StageSpec
from ppoctl.core import metric_registry
from ppoctl.core.batch.record_header import record_metadata
from ppoctl.core.step_metrics import reported
from ppoctl.recipe.schema import Recipe
from ppoctl.store import record_file
from ppoctl.store.journal import read_lines
from ppoctl.store.rounds import stages_present
from ppoctl.store.run_paths import RECORD, RunPaths

PPO = {"epochs": 1, "minibatch_seqs": 8}
IN_REWARD, IN_LOSS = {"place": "reward", "coef": 0.05}, {"place": "loss", "coef": 0.05}
ADAPTIVE = {"adaptive": {"target_per_token": 0.1, "horizon_seqs": 1000}}
SHAPED = {
    "kind": "exact_match",
    "scale": {"from": [0.0, 1.0], "to": [-1.0, 1.0]},
    "clip": {"low": -0.9, "high": 0.9},
    "moments": {"kind": "running"},
    "unfinished_factor": 0.5,
    "overlong": {"buffer_tokens": 2},
    "length_penalty": {"per_token": 0.01, "free_tokens": 1},
}

USERS = Path(__file__).parents[1] / "stages" / "users_training.py"

RECIPES: dict[str, dict[str, Any]] = {
    "none": {"ppo": {**PPO, "kl": {"place": "none"}}},
    "kl in reward": {"ppo": {**PPO, "kl": IN_REWARD}},
    "kl in loss": {"ppo": {**PPO, "kl": {**IN_LOSS, "estimator": "k3"}}},
    "full in reward": {"ppo": {**PPO, "kl": {**IN_REWARD, "estimator": "full"}}},
    "full in loss": {"ppo": {**PPO, "kl": {**IN_LOSS, "estimator": "full"}}},
    "adaptive full in loss": {"ppo": {**PPO, "kl": {**IN_LOSS, "estimator": "full", **ADAPTIVE}}},
    "adaptive in reward": {"ppo": {**PPO, "kl": {**IN_REWARD, **ADAPTIVE}}},
    "sampler": {"ppo": {**PPO, "kl": {"place": "none"}, "old_logprobs": "sampler"}},
    "sampler, kl in reward": {"ppo": {**PPO, "kl": IN_REWARD, "old_logprobs": "sampler"}},
    "current": {"ppo": {**PPO, "kl": {"place": "none"}, "old_logprobs": "current"}},
    "current, kl in loss": {"ppo": {**PPO, "kl": IN_LOSS, "old_logprobs": "current"}},
    "current, full in loss": {"ppo": {**PPO, "kl": {**IN_LOSS, "estimator": "full"}, "old_logprobs": "current"}},
    "gspo": {"ppo": {**PPO, "policy_loss": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2}}},
    "reinforce": {"ppo": {**PPO, "policy_loss": {"kind": "reinforce", "entropy_coef": 0.01}}},
    "nll and dual clip": {"ppo": {**PPO, "policy_loss": {"dual_clip": 3.0, "positive_nll_coef": 0.1}}},
    "tis": {"ppo": {**PPO, "rollout_correction": {"kind": "tis", "max_ratio": 2.0}}},
    "sequence mask": {
        "ppo": {**PPO, "rollout_correction": {"kind": "sequence_mask", "min_ratio": 0.5, "max_ratio": 2.0}}
    },
    "rejection": {"ppo": {**PPO, "max_sequence_gap": 5.0}},
    "bootstrap": {"ppo": {**PPO, "truncated": "bootstrap"}},
    "filter": {"ppo": {**PPO, "truncated": "filter"}, "rollout": {"max_new_tokens": 12}},
    "shaping": {"reward": SHAPED},
    "length adaptive": {"ppo": {**PPO, "advantages": {"kind": "gae", "length_adaptive_alpha": 0.5}}},
    "monte carlo": {"ppo": {**PPO, "advantages": {"kind": "monte_carlo", "gamma": 0.9}}},
    "critic first": {"ppo": {**PPO, "critic_only_until": {"explained_variance": -1.0, "at_most": 1}}},
    "critic only": {"ppo": {**PPO, "critic_only_steps": 1}},
    "resampling, critic only": {"ppo": {**PPO, "critic_only_steps": 1, "resample": {"kind": "max_min"}}},
    "resampling, corrected": {
        "ppo": {
            **PPO,
            "whiten_rewards": True,
            "resample": {"kind": "max_random", "order": "before_whitening"},
            "rollout_correction": {"kind": "icepop_sequence"},
        }
    },
    "grpo": {"ppo": {**PPO, "advantages": {"kind": "grpo"}, "kl": IN_LOSS}, "critic": None},
    "grpo, tis": {
        "ppo": {**PPO, "advantages": {"kind": "grpo", "scale": "none"}, "rollout_correction": {"kind": "tis"}},
        "critic": None,
    },
    **{
        name: {"ppo": {**PPO, "advantages": {"kind": name}, "kl": IN_LOSS}, "critic": None}
        for name in ("rloo", "opo", "grpo_passk", "reinforce_plus_plus_baseline")
    },
    "reinforce++": {
        "ppo": {**PPO, "advantages": {"kind": "reinforce_plus_plus", "gamma": 0.9}, "kl": IN_REWARD},
        "critic": None,
    },
    "python": {
        "ppo": {
            **PPO,
            "policy_loss": {"kind": "python", "function": f"{USERS}:every_grid", "needs_entropy": True},
            "advantages": {"kind": "python", "function": f"{USERS}:rewards_to_go", "trains_critic": True},
        }
    },
    "python without critic": {
        "ppo": {**PPO, "advantages": {"kind": "python", "function": f"{USERS}:median"}},
        "critic": None,
    },
    "remax": {
        "ppo": {**PPO, "advantages": {"kind": "remax"}, "kl": IN_LOSS, "rollout_correction": {"kind": "tis"}},
        "critic": None,
    },
    "raw reward": {"ppo": {**PPO, "advantages": {"kind": "raw_reward"}, "kl": IN_REWARD}, "critic": None},
}

_DTYPES = {"U8": "uint8", "BOOL": "bool", "I32": "int32", "I64": "int64", "F32": "float32"}


def recipe_of(name: str) -> Recipe:
    tables = {"steps": 1, "eval": {"at_start": False, "at_end": False}, **RECIPES[name]}
    rollout = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6}
    return fake_recipe(**{**tables, "rollout": {**rollout, **tables.get("rollout", {})}})


@dataclass(frozen=True)
class Played:
    """A run of at least one step, and the specs of the stages of step 1 in all rounds."""

    recipe: Recipe
    paths: RunPaths
    specs: tuple[StageSpec[Any], ...]
    selected_by: dict[str, str]
    """Stage -> last round of the selection that defines its rows, if a selection defines them."""


STAYS = {
    "full in reward": "full in loss; kl in reward",
    "adaptive in reward": "adaptive full in loss; kl in reward",
    "sampler, kl in reward": "sampler; kl in reward",
    "current, kl in loss": "current, full in loss",
    "gspo": "reinforce; nll and dual clip",
    "critic only": "resampling, critic only",
    "monte carlo": "raw reward; length adaptive",
    "grpo, tis": "grpo; tis",
    "rloo": "grpo",
    "opo": "grpo",
    "reinforce_plus_plus_baseline": "grpo",
    "resampled rows": "resampled, then whitened",
}
"""Recipes whose records have the fields of others, which stay in `make test`."""


MARKED = [
    pytest.param(name, marks=[pytest.mark.ci(STAYS[name])] if name in STAYS else []) for name in [*RECIPES, *EVERY]
]


@pytest.fixture(scope="module", params=MARKED)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    ppo = Algorithm(step_function_at, lambda **_: recipe_of(request.param))
    algorithm = EVERY.get(request.param, ppo)
    recipe = algorithm.recipe(steps=1, eval={"at_start": False, "at_end": False})
    root = tmp_path_factory.mktemp("declared") / "run"
    play(root, recipe, choose=algorithm.choose)
    trace, paths = trace_at(recipe, 1, algorithm.choose), RunPaths(root)
    names = [stage.name for stage in stages_present(paths, 1, trace.outline)]
    last = {name.partition(".")[0]: name for name in names}
    selected = {
        c.stage.name: last[c.rows] for c in trace.calls if c.rows in trace and trace[c.rows].kind == "selection"
    }
    return Played(recipe, paths, tuple(replace(trace[name], name=name) for name in names), selected)


def committed_fields(paths: RunPaths, stage: str) -> dict[str, tuple[str, list[int]]]:
    """Return the fields in the file of a record: name -> dtype and shape of a tensor, or `json` and no shape."""
    data = (paths.stage(1, stage) / RECORD).read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {
        name: (_DTYPES[entry["dtype"]], entry["shape"])
        for name, entry in header.items()
        if name not in ("__metadata__", "ppoctl")
    }
    return tensors | {name: ("json", []) for name in record_metadata(data)[1]}


def sizes_of_axes(played: Played, spec: StageSpec[Any]) -> dict[str, int]:
    """Return the sizes of the axes of a stage's record."""
    paths = played.paths
    if spec.kind == "selection":
        return {"B": committed_fields(paths, spec.name)["rounds"][1][0]}
    _, dot, number = spec.name.partition(".")
    rollout = "greedy_rollout" if spec.kind.startswith("greedy") else f"rollout{dot}{number}"
    fields = committed_fields(paths, spec.name if spec.kind.endswith("rollouts") else rollout)
    rows, width = fields["tokens"][1]
    if (selection := played.selected_by.get(spec.name)) is not None:
        rows = committed_fields(paths, selection)["rounds"][1][0]
    sizes = {"B": rows, "R": width, "T": fields["prompt_tokens"][1][0]}
    assert len(set(sizes.values())) == 3, "axes have different sizes, so that they cannot be confused"
    record = record_file.read(paths, 1, spec.name)
    if record is not None and record.get("experts") is not None:
        lengths = record.get("input_lengths")
        if lengths is None:
            lengths = record["prompt_lengths"] + record["lengths"] - 1
        sizes |= {"N": int(lengths.sum()), "E": 1}  # one expert, as in `fakes.bigram`
    return sizes


def test_declared_fields_are_the_committed_fields(played: Played) -> None:
    for spec in played.specs:
        sizes = sizes_of_axes(played, spec)
        declared = {
            field.name: ("json", [])
            if field.dtype in ("json", "text")
            else (field.dtype, [sizes[axis] for axis in field.axes.split()])
            for field in spec.record(played.recipe)
        }
        assert committed_fields(played.paths, spec.name) == declared, spec.name


def test_declared_metrics_are_the_reported_metrics(played: Played) -> None:
    lines = read_lines(played.paths.journal)
    of_stage = {line["stage"]: line for line in lines if line.get("step") == 1 and "stage" in line}
    for spec in played.specs:
        names = set(reported(of_stage[spec.name])) - set(_of_a_clock(spec))
        # The registry has one entry for all metrics of a user's function.
        found = {metric_registry.find(name).name if "/custom_" in name else name for name in names}
        assert found == _declared(spec, played.recipe), spec.name


def _declared(spec: StageSpec[Any], recipe: Recipe) -> set[str]:
    declared = {each.metric.name for each in spec.metrics(recipe) if each.is_on}
    return (declared | {f"time/{spec.name.partition('.')[0]}_s"}) - set(_of_a_clock(spec))


def _of_a_clock(spec: StageSpec[Any]) -> tuple[str, ...]:
    """Return metrics of elapsed time: `throughput/generated` is absent if a fake generator takes no time."""
    generated = (metric_registry.THROUGHPUT_GENERATED.name, metric_registry.TIME_GENERATION_S.name)
    return generated if spec.kind.endswith("rollouts") else ()
