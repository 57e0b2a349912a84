"""Each role's processes are built from the recipe's `[model]`."""

from typing import Any

import pytest
import torch

from fakes.fingerprints import stages_that_read
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.megatron_config import RouterBalance
from ppoctl.models.lora import Lora
from ppoctl.models.trainable import Trainable
from ppoctl.recipe.schema import Recipe
from wiring.cases import each_key
from wiring.harness import with_keys


@each_key(
    "key, changes, changed",
    [
        (
            "model.path",
            {"model.path": "other"},
            {"actor": ("other", torch.float32), "critic": ("other", torch.float32)},
        ),
        (
            "model.dtype",
            {"model.dtype": "bfloat16"},
            {"actor": ("bigram", torch.bfloat16), "critic": ("bigram", torch.bfloat16)},
        ),
        (
            "model.critic.path",
            {"model.critic": {"path": "judge"}},
            {"actor": ("bigram", torch.float32), "critic": ("judge", torch.float32)},
        ),
        (
            "model.critic.path",
            {"model.critic": "judge"},  # as earlier versions wrote it
            {"actor": ("bigram", torch.float32), "critic": ("judge", torch.float32)},
        ),
        (
            "model.critic.dtype",
            {"model.critic": {"path": "bigram", "dtype": "bfloat16"}},
            {"actor": ("bigram", torch.float32), "critic": ("bigram", torch.bfloat16)},
        ),
        (
            "model.reference.path",
            {"model.reference": {"path": "other"}},
            {"actor": ("bigram", torch.float32, "other"), "critic": ("bigram", torch.float32)},
        ),
    ],
)
def test_role_starts_from_the_model_and_dtype_of_the_recipe(
    key: str, changes: dict[str, Any], changed: dict[str, tuple[Any, ...]]
) -> None:
    for written, expected in (
        ({}, dict.fromkeys(("actor", "critic"), ("bigram", torch.float32))),
        (changes, changed),
    ):
        recipe = Recipe.model_validate(with_keys(written))
        found = {role: trainer_settings(recipe, role) for role in ("actor", "critic")}
        assert {role: (made.model, made.dtype) for role, made in found.items()} == {
            role: settings[:2] for role, settings in expected.items()
        }
        # Without its own model, the reference is the actor's initial model. Only the actor's processes have it.
        assert found["critic"].reference is None
        assert found["actor"].reference == (expected["actor"][2:] or expected["actor"])[0]


@each_key(
    "key, value",
    [
        (key.format(role=role), value)
        for role in ("actor", "critic")
        for key, value in (
            ("{role}.train.top_layers", 1),
            ("{role}.train.top_layers", 3),
            ("{role}.freeze", ["*norm*"]),
            ("{role}.train.lora.rank", 2),
            ("{role}.train.lora.alpha", 5.0),
            ("{role}.train.lora.targets", ["v_proj", "o_proj"]),
        )
    ],
)
def test_role_trains_the_part_of_its_model_that_the_recipe_selects(key: str, value: Any) -> None:
    role, *inside = key.split(".")
    changes = value
    for name in reversed(inside[1:]):
        changes = {name: changes}
    as_is, other = (Recipe.model_validate(with_keys(written)) for written in ({}, {f"{role}.{inside[0]}": changes}))
    expected = {
        "freeze": lambda: Trainable(freeze=tuple(value)),
        "top_layers": lambda: Trainable(top_layers=value),
        "rank": lambda: Trainable(lora=Lora(value, 32.0)),
        "alpha": lambda: Trainable(lora=Lora(8, value)),
        "targets": lambda: Trainable(lora=Lora(8, 32.0, tuple(value))),
    }[inside[-1]]()
    parts = {name: trainer_settings(other, name).trainable for name in ("actor", "critic")}
    assert parts == {name: expected if name == role else Trainable() for name in parts}
    assert f"{role}_update" in stages_that_read(as_is, other) <= {f"{role}_update", "logprobs"}


@each_key("key, changed", [(f"{role}.train.lora.start", {"start": "/adapter"}) for role in ("actor", "critic")])
def test_adapters_of_a_role_start_from_the_folder_of_the_recipe(key: str, changed: dict[str, str]) -> None:
    role = key.split(".")[0]
    drawn, read = (
        Recipe.model_validate(with_keys({f"{name}.train": {"lora": lora} for name, lora in tables.items()}))
        for tables in ({"actor": {}, "critic": {}}, {"actor": {}, "critic": {}, role: changed})
    )
    folders = {name: trainer_settings(read, name).adapters for name in ("actor", "critic")}
    assert folders == {name: "/adapter" if name == role else None for name in folders}
    assert {trainer_settings(drawn, name).adapters for name in folders} == {None}
    assert f"{role}_update" in stages_that_read(drawn, read) <= {f"{role}_update", "logprobs"}


@each_key("key, value", [("actor.router_aux_loss_coef", 0.01), ("actor.router_bias_rate", 0.002)])
def test_experts_of_the_actor_are_balanced_as_the_recipe_sets(key: str, value: float) -> None:
    as_is, other = (Recipe.model_validate(with_keys(written)) for written in ({}, {key: value}))
    expected = RouterBalance(value, 0.0) if key.endswith("coef") else RouterBalance(0.0, value)
    found = {role: trainer_settings(other, role).balance for role in ("actor", "critic")}
    assert found == {"actor": expected, "critic": RouterBalance(0.0, 0.0)}
    assert trainer_settings(as_is, "actor").balance == RouterBalance(0.0, 0.0)
    assert stages_that_read(as_is, other) == {"actor_update"}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_place_of_the_optimizer_is_in_no_fingerprint(role: str) -> None:
    """Both places give equal bits."""
    device, host = (Recipe.model_validate(with_keys({f"{role}.optimizer.on": on})) for on in ("device", "cpu"))
    assert stages_that_read(device, host) == set()
