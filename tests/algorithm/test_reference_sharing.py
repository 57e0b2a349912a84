"""The decision which weights and layers the reference of the KL penalty shares with the actor."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.algorithms.forward_specs import LogprobsSpec
from ppoctl.algorithms.role_model import reference_of, shared_layers
from ppoctl.algorithms.stage_spec import ModelPass
from ppoctl.recipe.schema import Recipe

LLAMA = "meta-llama/Llama-3.2-1B-Instruct"
"""16 layers, with a tied output layer."""
TOP = {"train": {"top_layers": 3}}
LOGPROBS = LogprobsSpec("logprobs")


def recipe_of(actor: dict[str, Any], *, ppo: dict[str, Any] | None = None, **model: Any) -> Recipe:
    table = {"path": LLAMA, **model}
    kl = {"epochs": 2, "minibatch_seqs": 4, "kl": {"place": "loss", "coef": 0.05}, **(ppo or {})}
    return fake_recipe(actor={"optimizer": {"lr": 0.05}, **actor}, model=table, ppo=kl)


@pytest.mark.parametrize(
    ("actor", "model", "kind", "layers"),
    [
        ({}, {}, "own", 0),
        (TOP, {}, "shared", 13),
        (TOP, {"reference": {"path": "other"}}, "own", 0),
        (TOP, {"reference": {"path": LLAMA}}, "shared", 13),
        (TOP, {"path": "no-such-model"}, "shared", 0),
        ({"freeze": "decoder.layers.*.mlp.*"}, {}, "shared", 0),
        ({"freeze": ["embedding.*", "decoder.layers.[0-4].*"]}, {}, "shared", 5),
        ({"freeze": ["embedding.*", "decoder.layers.*"]}, {}, "shared", 16),
        ({"train": {"lora": {"rank": 4}}}, {}, "adapters_off", 0),
        ({"train": {"lora": {"rank": 4}}}, {"reference": {"path": "other"}}, "own", 0),
    ],
)
def test_only_an_initial_model_with_frozen_weights_is_shared(
    actor: dict[str, Any], model: dict[str, Any], kind: str, layers: int
) -> None:
    recipe = recipe_of(actor, **model)
    assert (reference_of(recipe), shared_layers(recipe)) == (kind, layers)


OWN, REFERENCE = ModelPass("forward", "actor"), ModelPass("forward", "reference")
BOTH = ModelPass("forward", "actor", with_reference=True)
FULL = {"kl": {"place": "reward", "coef": 0.05, "estimator": "full"}}


@pytest.mark.parametrize(
    ("actor", "ppo", "passes"),
    [
        ({}, {}, (OWN, REFERENCE)),
        (TOP, {}, (BOTH,)),
        (TOP, {"old_logprobs": "sampler"}, (REFERENCE,)),
        ({"freeze": "decoder.layers.3.*"}, {}, (OWN, REFERENCE)),
        (TOP, {"kl": {"place": "none"}}, (OWN,)),
        (TOP, FULL, (BOTH,)),
        ({}, FULL, (BOTH,)),
    ],
)
def test_logprobs_take_one_pass_if_the_trunk_is_shared(
    actor: dict[str, Any], ppo: dict[str, Any], passes: tuple[ModelPass, ...]
) -> None:
    assert LOGPROBS.passes(recipe_of(actor, ppo=ppo)) == passes


def test_sharing_does_not_change_the_fingerprint_of_logprobs() -> None:
    assert LOGPROBS.fingerprint(recipe_of(TOP)) == LOGPROBS.fingerprint(recipe_of({}))
