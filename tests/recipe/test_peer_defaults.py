"""The recipes of `ppoctl recipes coming-from SYSTEM --defaults`: each key of the other system exists, and each value
can be loaded before one's own recipe, and differs from ppoctl's default."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ppoctl.cli.manual.algorithm_pages import defaults_of
from ppoctl.core.key_path import dotted
from ppoctl.core.recipe_table import Effect
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.key_mappings import ALGORITHMS, find, systems
from ppoctl.recipe.loading.load import Loaded, load
from ppoctl.recipe.loading.origins import paths_in
from ppoctl.recipe.schema import Recipe
from recipe.conftest import SMALLEST, Write
from recipe.test_foreign_keys import keys_of

ROOT = tree.of(Recipe)
SYSTEMS = {system.name: system for system in systems()}
LISTS = {"verl": "verl", "NeMo-RL": "nemo_rl", "TRL": "trl"}
CASES = [(name, algorithm) for name in LISTS for algorithm in ALGORITHMS]
OWN = """\
name = "own"
[model]
path = "base"
[data.train]
format = "gsm8k"
path = "train.jsonl"
[reward]
kind = "gsm8k"
"""
REQUIRED = {
    "steps": 10,
    "rollout.prompts_per_step": 4,
    "rollout.max_prompt_tokens": 20,
    "rollout.max_new_tokens": 13,
    "ppo.minibatch_seqs": 2,
    "actor.optimizer.lr": 1e-6,
}
"""Keys that a recipe requires, as far as the defaults of a system do not set them."""


def written(name: str, algorithm: str) -> dict[str, Any]:
    """Return the values of a recipe of defaults by dotted key."""
    document = tomllib.loads(defaults_of(SYSTEMS[name], algorithm))
    values = {}
    for path in paths_in(document):
        value: Any = document
        for part in path:
            value = value[part]
        if not isinstance(value, dict):
            values[dotted(path)] = value
    return values


def loaded_after(write: Write, name: str, algorithm: str) -> Loaded:
    """Load the defaults, and then a recipe that has only what is missing."""
    given = written(name, algorithm)
    write('{"question": "1 + 1", "answer": "#### 2"}\n' * 100, "train.jsonl")
    sets = [f"{key}={value}" for key, value in REQUIRED.items() if key not in given]
    sets = [each for each in sets if not (each.startswith("steps=") and "epochs" in given)]
    if algorithm == "grpo":
        sets += ["ppo.advantages.kind=grpo"]
        sets += [] if "rollout.samples_per_prompt" in given else ["rollout.samples_per_prompt=2"]
    return load([write(defaults_of(SYSTEMS[name], algorithm), "peer.toml"), write(OWN, "own.toml")], sets, {})


def flat(loaded: Loaded) -> dict[str, Any]:
    return {dotted(entry.path): entry.value for entry in tree.values(loaded.recipe)}


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_default_has_a_key_of_the_other_system_that_maps_to_ours(name: str, algorithm: str) -> None:
    system, known = SYSTEMS[name], set(keys_of(LISTS[name]))
    assert system.defaults is not None
    wrong = []
    for default in system.defaults.of[algorithm]:
        [answer] = [each for each in find(tuple(default.theirs.split("."))) if each.system == name]
        mapped = {key.partition(" = ")[0].rpartition(".")[0] for key in answer.ours}
        ours = {line.partition(" = ")[0] for line in default.ours}
        # The order of minibatches and the interval of a schedule have no key: they belong to a key of the same table.
        if default.theirs not in known or not {key.rpartition(".")[0] for key in ours} <= mapped:
            wrong.append((default, answer.ours))
    assert wrong == []


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_defaults_load_before_own_recipe_and_differ_from_ours(write: Write, name: str, algorithm: str) -> None:
    given = written(name, algorithm)
    both = flat(loaded_after(write, name, algorithm))
    alone = flat(load([write(SMALLEST, "smallest.toml")], (), {}))
    assert len(given) >= 7
    for key, value in given.items():
        if key == "epochs":  # a number of steps replaces it
            assert both["steps"] != alone["steps"]
            continue
        found = both[key]
        assert (list(found) if isinstance(found, tuple) else found) == value, key
        keys = tree.keys_at(ROOT, tuple(key.split(".")))
        assert any(known.effect is Effect.RESULTS for known in keys) or key.startswith("eval."), key
        assert any(known.required for known in keys) or alone.get(key) != value, key


def test_own_recipe_replaces_the_defaults(write: Write) -> None:
    write('{"question": "1 + 1", "answer": "#### 2"}\n' * 100, "train.jsonl")
    peer = write(defaults_of(SYSTEMS["verl"], "ppo"), "peer.toml")
    own = SMALLEST.replace('kind = "gsm8k"', 'kind = "math"') + '[ppo.policy_loss]\nkind = "gspo"\n'
    recipe = load([peer, write(own, "own.toml")], (), {}).recipe
    assert recipe.steps == 10  # not the number of `epochs`
    assert (recipe.reward.kind, recipe.reward.last_chars) == ("math", None)  # type: ignore[attr-defined]
    assert not hasattr(recipe.ppo.policy_loss, "dual_clip")
    assert recipe.actor.optimizer.weight_decay == 0.01


def test_every_line_of_defaults_has_its_source() -> None:
    lines = defaults_of(SYSTEMS["verl"], "grpo").splitlines()
    at = lines.index("actor.optimizer.weight_decay = 0.01")
    assert lines[at - 1] == (
        "# actor_rollout_ref.actor.optim.weight_decay: 0.01 (verl/trainer/config/optim/fsdp.yaml)"
    )
    assert not [line for line in lines if line.startswith("critic.")]  # GRPO has no critic


def test_recipe_is_valid_toml_that_names_its_command(tmp_path: Path) -> None:
    text = defaults_of(SYSTEMS["TRL"], "ppo")
    (tmp_path / "trl.toml").write_text(text)
    assert "ppoctl recipes coming-from trl --defaults --algorithm ppo > trl.toml" in text
    assert tomllib.loads(text)["ppo"]["kl"] == {"place": "reward", "coef": 0.05}
