"""Every key of another system's PPO has its own message: a row, or an entry of a list with a reason.

The lists of `foreign_keys/` contain the keys in the systems' own files of July and August 2026 (trlX: its last
version): NeMo-RL's configurations of PPO and GRPO, with NeMo-Gym's (commit 7ea279a); verl's generated configurations
for FSDP and Megatron-Core, and its PPO and GRPO scripts; trlX's, with those for NeMo; the arguments of TRL's PPO,
GRPO, RLOO and asynchronous GRPO (commit f2cd577) and of transformers' `TrainingArguments`; OpenRLHF's options; the
fields of peft's `LoraConfig`.
"""

import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from conventions.conftest import PACKAGE
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.key_mappings import nearest, systems
from ppoctl.recipe.loading.load import examine
from ppoctl.recipe.schema import Recipe
from recipe.conftest import Write

NAMES = {"nemo_rl": 1153, "verl": 1183, "trlx": 225, "trl": 242, "openrlhf": 164, "peft": 84}
"""The lists, and the number of keys in each."""
ALONE_TOO = pytest.mark.ci("alone; in a recipe-trlx")
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
    """Return the system, the messages for its keys by row, those by pattern of a list, and the tables that share the
    answers of another table. Reads the file itself."""
    file = tomllib.loads((PACKAGE / "recipe" / "other_systems" / f"{name}.toml").read_text("utf-8"))
    rows, lists = {}, {}
    for key, row in file["keys"].items():
        for theirs, ours in (file["roles"] if "ROLE" in key else {"": ""}).items():
            keys = [f"`{each.replace('ROLE', ours)}`" for each in row.get("is", "").split(", ") if each]
            values = ", ".join(f"`{each}` is `{mine}`" for each, mine in row.get("values", {}).items())
            note = "; ".join(filter(None, (values, row.get("note"))))
            note = f": {note}" if note else ""
            answer = f"use {' and '.join(keys)}" if keys else "ppoctl has no such key"
            rows[key.replace("ROLE", theirs)] = f"{answer}{note}"
    for each in file["unused"]:
        for key in each["keys"]:
            for theirs in file["roles"] if "ROLE" in key else [""]:
                lists[key.replace("ROLE", theirs)] = f"ppoctl has no such key: {each['why']}"
    return file["name"], rows, lists, file.get("same", {})


def answers_to(key: str, rows: dict[str, str], lists: dict[str, str]) -> list[str]:
    """Return the messages of a row with this key; without one, of each pattern that matches it."""
    own = [each[key] for each in (rows, lists) if key in each]
    if own:
        return own
    patterns = {it: why for it, why in {**rows, **lists}.items() if "*" in it}
    return [why for it, why in patterns.items() if fnmatchcase(key, it) or it == f"{key}.*"]


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        *(pytest.param(name, True, id=f"alone-{name}") for name in NAMES),
        *(
            pytest.param(name, False, id=f"in a recipe-{name}", marks=[ALONE_TOO] if count > 1000 else [])
            for name, count in NAMES.items()
        ),
    ],
)
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
        found = answers_to(key, rows, lists) or answers_to(twin, rows, lists)
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


@pytest.mark.parametrize(
    "key",
    [
        "env.judge.judge_model_server.type",  # `type` of verl's `algorithm.kl_ctrl`
        "mystery.enabled",
        "mystery.model_name",
        "mystery.resources.num_nodes",
        "mystery.server.max_model_len.name",
        "trainer.mystery.total_steps",
        "mystery.batch_size",
    ],
)
def test_key_gets_no_suggestion_by_a_name_that_every_system_has(key: str) -> None:
    assert nearest(tuple(key.split("."))) is None


@pytest.mark.parametrize(
    ("key", "theirs"),
    [
        ("loss.kl.type", "algorithm.kl_ctrl.type"),  # `kl` is in both
        ("mystery.response_length", "response_length"),
        ("actor.lr_scheduler_type", "lr_scheduler_type"),
    ],
)
def test_key_gets_suggestion_by_uncommon_name_or_same_word_in_table(
    smallest: Path, write: Write, key: str, theirs: str
) -> None:
    says = told(write, [key], smallest)[key]
    assert says.startswith("a suggestion: ")
    assert f"`{theirs}`" in says


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


def test_value_of_foreign_key_is_translated(smallest: Path, write: Write) -> None:
    pasted = write(
        """[actor_rollout_ref.actor]
        kl_loss_type = "low_var_kl"
        loss_agg_mode = "seq-mean-token-mean"
        [algorithm]
        kl_penalty = "kl"
        norm_adv_by_std_in_grpo = false
        [grpo]
        normalize_rewards = true
        [actor_rollout_ref.rollout]
        enforce_eager = false
        """,
        "pasted.toml",
    )
    said = [finding.what for finding in examine([smallest, pasted], (), {})[1]]
    beginnings = (
        "`actor_rollout_ref.actor.kl_loss_type`; it is a key of verl; use `ppo.kl.estimator`: "
        '`low_var_kl` is `"k3"`; other names are the same. ',
        "`actor_rollout_ref.actor.loss_agg_mode`; it is a key of verl; use `ppo.policy_loss.aggregation`: "
        '`seq-mean-token-mean` is `"sequence_mean_token_mean"`; ',
        '`algorithm.kl_penalty`; it is a key of verl; use `ppo.kl.estimator`: `kl` is `"k1"`; ',
        '`algorithm.norm_adv_by_std_in_grpo`; it is a key of verl; use `ppo.advantages.scale`: `false` is `"none"`; ',
        '`grpo.normalize_rewards`; it is a key of NeMo-RL; use `ppo.advantages.scale`: `true` is `"group"`; ',
        "`actor_rollout_ref.rollout.enforce_eager`; it is a key of verl; use `generator.compile`: "
        "`false` is `true`; ",
    )
    for each in beginnings:
        assert [what for what in said if what.startswith(f"unknown key {each}")], each
    assert not [what for what in said if "leave it out" in what]


def test_every_translated_value_is_a_value_of_our_key() -> None:
    wrong = []
    for system in systems():
        for row in system.rows:
            for theirs, mine in row.values.items():
                first, *others = mine.split(", ")
                pairs = [(row.ours[0][0], first), *(tuple(other.split(" = ")) for other in others)]
                wrong += [(row.theirs, theirs, key, value) for key, value in pairs if not is_value(key, value)]
    assert wrong == []


def is_value(key: str, value: str) -> bool:
    """Whether a value may be written for a key, as far as the schema lists values."""
    found, written = tree.keys_at(tree.of(Recipe), tuple(key.split("."))), tomllib.loads(f"value = {value}")["value"]
    allowed = [each for known in found for each in tree.allowed(known.field.annotation)]
    return bool(found) and (written in allowed if allowed else isinstance(written, bool | str))


def test_every_key_that_books_devices_states_their_use() -> None:
    books = {"slurm.nodes", "slurm.gpus_per_node"}
    rows = [row for system in systems() for row in system.rows if books & set(row.ours_of_all)]
    assert {name for row in rows for name in row.theirs} >= {"trainer.n_gpus_per_node", "cluster.gpus_per_node"}
    used = ("actor.parallel", "generator.engines", "plan --fit 80 --gpus N")
    assert [row.theirs for row in rows if not all(word in row.note for word in used)] == []
