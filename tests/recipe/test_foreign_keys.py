"""Every key of another system's PPO has its own message: a row, or an entry of a list with a reason.

The lists of `foreign_keys/` contain the keys in the systems' own files of July and August 2026 (trlX: its last
version): NeMo-RL's PPO and GRPO configurations; verl's generated configurations for FSDP and Megatron-Core, and its
PPO and GRPO scripts; trlX's, with those for NeMo; the arguments of TRL's PPO and of transformers'
`TrainingArguments`; OpenRLHF's options; the fields of peft's `LoraConfig`.
"""

import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from conventions.conftest import PACKAGE
from ppoctl.loading.load import examine
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe
from recipe.conftest import Write

NAMES = {"nemo_rl": 489, "verl": 1180, "trlx": 225, "trl": 154, "openrlhf": 164, "peft": 84}
"""The lists, and the number of keys in each."""
OURS_TOO = {
    "trlx": {"name"},
    "trl": {"model", "seed"},
    "openrlhf": {"eval.temperature", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"},
}
"""Keys that have the same name in a ppoctl recipe, so that no message is needed."""


def keys_of(name: str) -> list[str]:
    return (Path(__file__).parent / "foreign_keys" / f"{name}.txt").read_text("utf-8").split()


def told(write: Write, keys: Sequence[str], *files: Path) -> dict[str, str]:
    """Return the message for each key of a configuration that is pasted as TOML, after some recipes."""
    pasted = write("".join(f"{key} = 1\n" for key in keys), "pasted.toml")
    _, problems = examine([*files, pasted], (), {})
    found = [re.fullmatch(r"unknown key `([^`]+)`(?:; )?(.*)", problem.what, re.DOTALL) for problem in problems]
    return {each.group(1): each.group(2) for each in found if each}


def answers(name: str) -> tuple[str, dict[str, str], dict[str, str], dict[str, str]]:
    """Return the system, the messages for its keys, by row and by pattern of a list, and the tables whose keys have
    the answers of another table, read from the file itself."""
    file = tomllib.loads((PACKAGE / "recipe" / "other_systems" / f"{name}.toml").read_text("utf-8"))
    rows, lists = {}, {}
    for key, row in file["keys"].items():
        for theirs, ours in (file["roles"] if "ROLE" in key else {"": ""}).items():
            keys = [f"`{each.replace('ROLE', ours)}`" for each in row.get("is", "").split(", ") if each]
            note = f": {row['note']}" if "note" in row else ""
            answer = f"use {' and '.join(keys)}" if keys else "ppoctl has no such key"
            rows[key.replace("ROLE", theirs)] = f"{answer}{note}"
    for each in file["unused"]:
        for key in each["keys"]:
            for theirs in file["roles"] if "ROLE" in key else [""]:
                lists[key.replace("ROLE", theirs)] = f"ppoctl has no such key: {each['why']}"
    return file["name"], rows, lists, file.get("same", {})


def answers_to(key: str, rows: dict[str, str], lists: dict[str, str]) -> list[str]:
    """Return the messages of a row with this key, then of each pattern that matches it."""
    patterns = {it: why for it, why in {**rows, **lists}.items() if it != key and "*" in it}
    listed = [why for it, why in patterns.items() if fnmatchcase(key, it) or it == f"{key}.*"]
    return [each[key] for each in (rows, lists) if key in each] + listed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alone", [False, True], ids=["in a recipe", "alone"])
def test_every_key_of_other_system_has_mapping_or_listed_reason(
    smallest: Path, write: Write, name: str, *, alone: bool
) -> None:
    """Also if nothing else is written, so that no `kind` or `format` shows which keys a table has."""
    keys, (system, rows, lists, same) = keys_of(name), answers(name)
    assert len(set(keys)) == NAMES[name]
    said = told(write, keys, *([] if alone else [smallest]))
    wrong = {}
    for key in keys:
        table, _, rest = key.partition(".")
        twin = f"{same[table]}.{rest}" if table in same else key
        found = [answer for each in (key, twin) for answer in answers_to(each, rows, lists)]
        expected = f"it is a key of {system}; {found[0]}" if found else "(no answer)"
        if key not in OURS_TOO.get(name, ()) and expected not in said.get(key, ""):
            wrong[key] = (expected, said.get(key))
    assert wrong == {}
    assert {key for key in keys if key not in said} == OURS_TOO.get(name, set())
    assert OURS_TOO.get(name, set()) <= rows.keys()
    assert all(tree.keys_at(tree.of(Recipe), tuple(key.split("."))) for key in OURS_TOO.get(name, ()))


def test_enabled_switches_are_not_mistaken_for_other_keys(smallest: Path, write: Write) -> None:
    """All of them got the answer for `reward.scale`, whose key has the same last name."""
    switches = [key for key in keys_of("nemo_rl") if key.endswith(".enabled")]
    assert len(switches) >= 14
    said = told(write, [*switches, "policy.mystery.enabled", "enabled"], smallest)
    by_scale = {key for key, says in said.items() if "reward.scale" in says}
    assert by_scale == {"ppo.reward_scaling.enabled", "grpo.reward_scaling.enabled"}
    assert said["policy.mystery.enabled"] == ""
    assert "Megatron-Core always trains in ppoctl" in said["policy.megatron_cfg.enabled"]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (
            "ppo.policy_loss.ratio_clip_max",
            "NeMo-RL's `loss_fn.ratio_clip_max` is `ppo.policy_loss.clip_high` in ppoctl",
        ),
        (
            "critic.megatron_cfg.optimizer.lr",
            "NeMo-RL's `value.megatron_cfg.optimizer.lr` is `critic.optimizer.lr` in ppoctl",
        ),
        ("actor.num_layers_unfrozen", "`num_layers_unfrozen` of other systems is `actor.train.top_layers` in ppoctl"),
        (
            "actor.freeze_moe_router",
            "`freeze_moe_router` of other systems is "
            '`actor.freeze = ["decoder.layers.*.mlp.router.weight"]` in ppoctl',
        ),
        ("reward.disable_tqdm", "TRL's `disable_tqdm` has no counterpart in ppoctl"),
    ],
)
def test_unknown_key_gets_nearest_foreign_key_as_suggestion(
    smallest: Path, write: Write, key: str, says: str
) -> None:
    assert told(write, [key], smallest)[key].startswith(f"a suggestion: {says}")


@pytest.mark.parametrize("key", ["clip_ratio_high", "actor.clip_ratio_high"])
def test_role_prefix_of_foreign_key_is_optional(smallest: Path, write: Write, key: str) -> None:
    assert told(write, [key], smallest)[key].startswith("it is a key of verl; use `ppo.policy_loss.clip_high`")


def test_foreign_key_of_both_roles_maps_to_both(smallest: Path, write: Write) -> None:
    says = told(write, ["optim.lr"], smallest)["optim.lr"]
    assert says == "it is a key of verl; use `actor.optimizer.lr` and `critic.optimizer.lr`"


def test_key_of_two_systems_is_mapped_for_each(smallest: Path, write: Write) -> None:
    assert told(write, ["train.batch_size"], smallest)["train.batch_size"] == (
        "it is a key of trlX; use `ppo.minibatch_seqs`: per data rank in trlX, of all ranks in ppoctl; "
        "it is a key of OpenRLHF; use `ppo.minibatch_seqs`"
    )
