"""Each role's processes are built from the recipe's `[model]`."""

from typing import Any

import torch

from fakes.fingerprints import stages_that_read
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.model.trainable import Trainable
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
        )
    ],
)
def test_role_trains_the_part_of_its_model_that_the_recipe_selects(key: str, value: Any) -> None:
    role, table = key.split(".")[:2]
    written = {f"{role}.{table}": {"top_layers": value} if table == "train" else value}
    as_is, other = (Recipe.model_validate(with_keys(changes)) for changes in ({}, written))
    expected = Trainable(top_layers=value) if table == "train" else Trainable(freeze=tuple(value))
    parts = {name: trainer_settings(other, name).trainable for name in ("actor", "critic")}
    assert parts == {name: expected if name == role else Trainable() for name in parts}
    assert f"{role}_update" in stages_that_read(as_is, other) <= {f"{role}_update", "logprobs"}
