"""The metric registry and the metrics of runs: every reported metric is registered, every registered metric is
reported under some setting, and the recipe's rules refuse exactly the metrics that this recipe does not report."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from fakes.components import FEW_ROWS, fake_recipe
from fakes.job import MEMORY, play
from ppoctl.core.metric_registry import ADVANTAGE_EQUAL_GROUPS_FRAC, METRICS, PEAKS, find, pass_metrics
from ppoctl.core.speed_metrics import load_metrics
from ppoctl.core.step_metrics import reported
from ppoctl.recipe.loading.rules.metrics_rules import check_metrics_reported
from ppoctl.recipe.schema import Recipe
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

HELD = {"eval": {"held": {"format": "gsm8k", "path": "none"}}, "train": {"format": "gsm8k", "path": "none"}}
TESTS = Path(__file__).parents[1]
PPO: Mapping[str, Any] = {"epochs": 2, "minibatch_seqs": 4}
ARITHMETIC: Mapping[str, Any] = {
    "clip": {"low": 0.0, "high": 0.7},
    "moments": {"kind": "running"},
    "unfinished_factor": 0.5,
    "overlong": {"buffer_tokens": 2},
    "length_penalty": {"per_token": 0.1},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "no reference": {"ppo": PPO},
    "a reference in the reward": {"ppo": {**PPO, "kl": {"place": "reward", "coef": 0.05}}},
    "a reference in the loss": {"ppo": {**PPO, "kl": {"place": "loss", "coef": 0.05}}},
    "raw advantages": {"ppo": {**PPO, "advantages": {"kind": "gae", "whiten": False}}},
    "clipped values, two clips": {"ppo": {**PPO, "value_loss": {"clip": 0.1}, "policy_loss": {"dual_clip": 3.0}}},
    "gspo": {"ppo": {**PPO, "policy_loss": {"kind": "gspo", "entropy_coef": 0.1}}},
    "cispo": {"ppo": {**PPO, "policy_loss": {"kind": "cispo", "positive_nll_coef": 0.1}}},
    "reinforce, the sampler's log-probs": {
        "ppo": {**PPO, "policy_loss": {"kind": "reinforce"}, "old_logprobs": "sampler"}
    },
    "forced on-policy": {
        "ppo": {"epochs": 1, "minibatch_seqs": 8, "kl": {"place": "loss", "coef": 0.05}, "old_logprobs": "current"}
    },
    "a coefficient that adapts": {
        "ppo": {**PPO, "kl": {"place": "loss", "coef": 0.05, "adaptive": {"target_per_token": 0.01}}}
    },
    "old responses": {"rollout": {**FEW_ROWS, "ahead": 1}, "ppo": {**PPO, "rollout_correction": {"kind": "tis"}}},
    "old groups": {
        "rollout": {**FEW_ROWS, "ahead": 1, "groups": {"when_short": "use_fewer"}},
        "ppo": {**PPO, "rollout_correction": {"kind": "tis"}},
    },
    "responses of two steps": {
        "rollout": {**FEW_ROWS, "tokens_per_step": 2},
        "ppo": {**PPO, "rollout_correction": {"kind": "tis"}},
    },
    "a corrected rollout": {"ppo": {**PPO, "rollout_correction": {"kind": "tis"}}},
    "a masked rollout": {
        "ppo": {**PPO, "rollout_correction": {"kind": "sequence_mask", "min_ratio": 0.9, "max_ratio": 1.1}}
    },
    "rows that are sampled again": {
        "ppo": {
            **PPO,
            "resample": {"kind": "pow", "order": "before_whitening"},
            "rollout_correction": {"kind": "icepop_sequence"},
        }
    },
    "rejected tokens": {
        "ppo": {
            **PPO,
            "rollout_rejection": {"kind": "ratio", "level": "token", "max_ratio": 2.0},
            "max_sequence_gap": 2.0,
        }
    },
    "the critic until it is good": {"ppo": {**PPO, "critic_only_until": {"explained_variance": 1.0, "at_most": 1}}},
    "the critic first": {"ppo": {**PPO, "critic_only_steps": 1}},
    "the critic sees all groups": {"rollout": {**FEW_ROWS, "groups": {"critic_sees": "all", "overlap_rounds": True}}},
    "an environment": {
        "environment": {"kind": "python", "path": "fakes:Sum", "turns": 3, "tokens": 16},
        "reward": {"kind": "exact_match", "max_error_frac": 1.0},
    },
    "old responses of several turns": {
        "environment": {"kind": "python", "path": "fakes:Sum", "turns": 3, "tokens": 16},
        "reward": {"kind": "exact_match", "max_error_frac": 1.0},
        "rollout": {**FEW_ROWS, "ahead": 1},
        "ppo": {**PPO, "rollout_correction": {"kind": "tis"}},
    },
    "a strict reward": {"reward": {"kind": "gsm8k", "strict": True}},
    "a lenient reward": {"reward": {"kind": "gsm8k", "strict": False}},
    "a sum": {"reward": {"kind": "sum", "parts": {"number": {"kind": "gsm8k"}}}},
    "a scaled reward": {"reward": {"kind": "exact_match", "scale": {"from": [0, 1], "to": [-1, 2]}}},
    "all steps of the arithmetic": {"reward": {"kind": "exact_match", **ARITHMETIC}},
    "reference moments": {"reward": {"kind": "exact_match", "moments": {"kind": "reference"}}},
    "returns that go on": {"ppo": {**PPO, "truncated": "bootstrap"}},
    "truncated responses left out": {"ppo": {**PPO, "truncated": "filter"}},
    "lambda by length": {"ppo": {**PPO, "advantages": {"kind": "gae", "length_adaptive_alpha": 0.5}}},
    "a value head on the actor": {
        "critic": {"on": "actor"},
        "ppo": {**PPO, "truncated": "bootstrap", "value_loss": {"coef": 0.3}},
    },
    "adapters of the actor": {"actor": {"optimizer": {"lr": 0.02}, "train": {"lora": {}}}},
    "roles that are offloaded": {"cluster": {"offload": ["actor", "critic"]}},
    "remax": {"ppo": {**PPO, "advantages": {"kind": "remax"}}, "critic": None},
    "monte carlo": {"ppo": {**PPO, "advantages": {"kind": "monte_carlo"}}},
    "evaluations": {"data": HELD},
    "greedy evaluations": {"data": HELD, "eval": {"every_steps": 2, "passes": "greedy", "pass_score": 0.5}},
    "evaluations of two samples": {
        "data": HELD,
        "eval": {"passes": "sampled", "samples_per_prompt": 2, "pass_at": [2], "maj_at": [2], "pass_score": 0.5},
    },
    "a loss and an estimator of one's own": {
        "ppo": {
            **PPO,
            "policy_loss": {"kind": "python", "function": f"{TESTS}/stages/users_training.py:with_words"},
            "advantages": {
                "kind": "python",
                "function": f"{TESTS}/stages/users_training.py:rewards_to_go",
                "trains_critic": True,
            },
        }
    },
    "figures of one's own": {"data": HELD, "eval": {"metrics": f"{TESTS}/rewards/users_metrics.py:measure"}},
}


def recipe_of(setting: str) -> Recipe:
    """Return a recipe of one step, or of a second step if the actor does not train in the first."""
    steps = 2 if any(key.startswith("critic_only") for key in SETTINGS[setting].get("ppo", {})) else 1
    return fake_recipe(steps=steps, **{"eval": {"every_steps": 2, "at_start": False}, **SETTINGS[setting]})


@cache
def expectable(setting: str) -> frozenset[str]:
    """Return the metrics that the recipe may expect."""
    recipe = recipe_of(setting)
    name = "sum" if recipe.environment else "words"  # of a user's metric
    known = {metric.name.format(set="held", k=2, part="number", name=name) for metric in METRICS}
    wanted = {name: {"max": 1.0} for name in known}
    asking = Recipe.model_validate({**recipe.model_dump(by_alias=True), "expect": wanted})
    return frozenset(known - {conflict.keys[0][1] for conflict in check_metrics_reported(asking)})


def names_of(setting: str) -> frozenset[str]:
    """Return the metric names in the journal of a run. A fake always has a set to evaluate; the recipe
    may have none."""
    recipe = recipe_of(setting)
    with TemporaryDirectory(dir=MEMORY) as folder:
        play(Path(folder) / "run", recipe)
        lines = read_lines(RunPaths(Path(folder) / "run").journal)
    found = {name for line in lines for name in reported(line)}
    return frozenset(name for name in found if recipe.data.eval or "eval" not in name)


OF_REAL_PASSES = {
    *(name for stage in ("values", "logprobs", "critic_update", "actor_update") for name in pass_metrics(stage)),
    *PEAKS,
    *(name.format(k=2) for name in load_metrics("actor_update")),
}
"""Metrics that fakes do not report, because they run no model. `end_to_end/test_command_line.py` sees them."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_reported_metrics_are_exactly_the_expectable_metrics(setting: str) -> None:
    assert names_of(setting) == expectable(setting) - OF_REAL_PASSES


def test_every_registered_metric_is_reported_by_some_setting() -> None:
    """A setting reports what it may expect, as the test above checks."""
    named = {found.name for setting in SETTINGS for name in expectable(setting) if (found := find(name)) is not None}
    # No step function trains without a critic yet, which this metric requires.
    assert named | {ADVANTAGE_EQUAL_GROUPS_FRAC.name} == {metric.name for metric in METRICS}
