"""Families train from the command line. (The quickstart is a Qwen2.)"""

from pathlib import Path

import pytest

from end_to_end.cli_process import Forked
from end_to_end.real_drill import real_recipe
from end_to_end.tiny_models import tiny_model
from ppoctl.models.shape_reader import read_shape
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.store.journal import read_lines
from ppoctl.store.run_paths import RunPaths

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def metrics_of(forked: Forked, folder: Path, model: Path, name: str, *sets: str) -> dict[str, float]:
    """Return the metrics of the second step of two. A mixture trains the experts that generator or trainer chose, and
    balances them, also by their biases if they have some that train."""
    optimizer = {"optimizer": {"lr": 1e-3}}
    experts = read_shape(model).experts
    replay = "off" if experts is None else "trainer" if experts.shared_gate else "generator"
    actor = {**optimizer, "router_replay": replay}
    actor |= {} if experts is None else {"router_aux_loss_coef": 0.01}
    if experts is not None and experts.sigmoid is not None and not set(ADAPTERS) <= set(sets):
        actor["router_bias_rate"] = 0.01
    tables = {"model": {"path": str(model), "dtype": "float32"}, "actor": actor, "critic": optimizer}
    # No answer of a random model is right: tokens differ only in their discounted distance to the end.
    reward = {"kind": "gsm8k", "scale": {"from": [0, 1], "to": [-1, 1]}}
    ppo = {"minibatch_seqs": 4, "advantages": {"kind": "gae", "gamma": 0.9, "gae_lambda": 0.9}}
    recipe = real_recipe(every_steps=2, name=name, reward=reward, ppo=ppo, **tables)
    (folder / f"{name}.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    forked.succeeds(folder, "train", f"{name}.toml", "--set", "steps=2", *sets)
    stages = [line for line in read_lines(RunPaths(folder / "runs" / name).journal) if "stage" in line]
    found = [
        {k: v for line in stages if line["step"] == step for k, v in {**line["figures"], **line["clocked"]}.items()}
        for step in (1, 2)
    ]
    assert found[0]["policy/approx_kl"] > 1e-4  # the second step samples from other weights
    differ = [step.get("mismatch/experts_differ_frac") for step in found]
    assert differ == [None, None] if replay == "off" else all(0 <= each < 0.5 for each in differ)
    # In float32 the trainer's routers choose as the generator's do, and an update changes their choice.
    assert replay != "generator" or max(differ) < 0.01
    assert replay != "trainer" or min(differ) > 0
    assert ("policy/router_aux_loss" in found[1]) == (experts is not None)
    return found[1]


# CI tests a mixture of experts; `test_recipes_in_small.py` has a dense family.
IN_CI = pytest.param("deepseek_v3", (), marks=pytest.mark.ci("test_experts_change_in_place_as_in_a_new_engine"))
IN_THE_STORY = [
    pytest.param(kind, (), marks=pytest.mark.slow)
    for kind in ("gemma2", "gemma3_text", "llama", "mistral", "qwen2_moe", "qwen3", "qwen3_moe")
]


ADAPTERS = ("--set", "actor.train={lora={rank=4}}", "--set", "critic.train={lora={rank=4}}")
WITH_ADAPTERS = [
    pytest.param(kind, ADAPTERS, marks=pytest.mark.slow, id=f"{kind} with adapters")
    for kind in ("deepseek_v3", "qwen2_moe")
]


@pytest.mark.parametrize(("kind", "sets"), [IN_CI, *IN_THE_STORY, *WITH_ADAPTERS])
def test_family_trains_in_one_process(tmp_path: Path, forked: Forked, kind: str, sets: tuple[str, ...]) -> None:
    found = metrics_of(forked, tmp_path, tiny_model(kind, tmp_path / "model"), "alone", *sets)
    # The engine that generated step 2 held the weights that step 1 trained.
    assert found["mismatch/gap_max_abs"] < 1e-3


@pytest.mark.slow
@pytest.mark.minutes(1.5)
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "qwen3_moe"])
def test_family_trains_with_experts_on_two_ranks(tmp_path: Path, forked: Forked, kind: str) -> None:
    experts = tiny_model(kind, tmp_path / "model")
    alone = metrics_of(forked, tmp_path, experts, "alone")
    # Inactive roles are on the host: an export must bring back the weights that it needs.
    sets = [
        "actor.parallel={data=2,expert=2}",
        "critic.parallel={data=1}",
        "cluster.offload=['actor', 'critic', 'generator']",
    ]
    layout = [word for key in sets for word in ("--set", key)]
    shared = metrics_of(forked, tmp_path, experts, "shared", *layout)
    assert shared["rollout/response_tokens_mean"] == alone["rollout/response_tokens_mean"]
    assert shared["policy/entropy_mean"] == pytest.approx(alone["policy/entropy_mean"], rel=1e-3)
