"""A recipe may require a capability that ppoctl lacks: it can be validated and planned, and trained only with
`without`."""

from datetime import datetime
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.cli.options import with_accepted
from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.capabilities import NOT_YET, require_capable, wanting
from ppoctl.recipe.loading.load import load
from ppoctl.run.session import prepare
from recipe.conftest import SMALLEST, Write, refusal

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
MISSING = 'requires = ["critic-free", "async"]\n' + SMALLEST.replace('path = "base"', 'path = "a-hub/base"')


@pytest.fixture
def with_missing(write: Write) -> Path:
    """Write a recipe whose model is not on this machine; required capabilities are checked anyway."""
    write("".join(f'{{"question": "{n}?", "answer": "#### {n}"}}\n' for n in range(4)), "train.jsonl")
    return write(MISSING)


@pytest.mark.parametrize("command", ["validate", "plan"])
def test_recipe_with_planned_capabilities_is_validated_and_planned(
    with_missing: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, str(with_missing)]) == 0
    said = capsys.readouterr().err
    assert "`requires` names `critic-free`, which ppoctl cannot do yet: further algorithms without a" in said
    assert "training requires `--without async`" in said


def test_training_requires_all_missing_capabilities_accepted(with_missing: Path) -> None:
    recipe = load([with_missing], ['without=["async"]']).recipe
    assert wanting(recipe) == ("critic-free",)
    with pytest.raises(RecipeError, match="`critic-free`") as error:
        prepare(recipe, datetime(2026, 1, 2))
    assert error.value.hint == "--without critic-free  # accepts that the run deviates"
    require_capable(load([with_missing], with_accepted(None, ["async", "critic-free"])).recipe)


@pytest.mark.parametrize("command", ["train", "rollout"])
@pytest.mark.parametrize("where", [(), ("--on", "slurm")], ids=["here", "slurm"])
def test_missing_capability_stops_command_before_run_folder_exists(
    command: str, where: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Write a recipe whose model and rows are on this machine."""
    sets = ("--set", 'requires=["async"]', "--set", "data.train.max_rows=128")
    words = [command, str(QUICKSTART), *sets, "--runs", str(tmp_path / "runs"), *where]
    assert run(words) == 2
    assert "`requires` names `async`, which ppoctl cannot do yet" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_accepted_capabilities_are_saved_in_run_recipe(with_missing: Path) -> None:
    loaded = load([with_missing], with_accepted(["steps=3"], ["async", "critic-free"]))
    assert loaded.resolved()["requires"] == ["critic-free", "async"]
    assert loaded.resolved()["without"] == ["async", "critic-free"]
    assert loaded.recipe.steps == 3


@pytest.mark.parametrize("name", ["async", "critic-free", "sft-start"])
def test_every_planned_capability_can_be_required(write: Write, name: str) -> None:
    recipe = load([write(f'requires = ["{name}"]\n{SMALLEST}')]).recipe
    assert wanting(recipe) == (name,)


ESTIMATORS = ("gpg", "optimal_token_baseline")


@pytest.mark.parametrize("name", ["dynamic-sampling", "freezing", "lora", "pf-ppo", "tools"])
def test_capability_that_came_since_may_still_be_required(write: Write, name: str) -> None:
    recipe = load([write(f'requires = ["{name}"]\nwithout = ["{name}"]\n{SMALLEST}')]).recipe
    assert wanting(recipe) == ()


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_critic_free_estimator_is_reported_as_not_available_yet(smallest: Path, kind: str) -> None:
    assert refusal([smallest], [f"ppo.advantages.kind={kind}"]).message == (
        f'--set: `ppo.advantages.kind` is `"{kind}"`, a known feature that is not available yet: further '
        "algorithms without a critic (GPG, optimal token baselines)"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("RLOO", '`"rloo"` is rloo of verl'),
        ("reinforce++", '`"reinforce_plus_plus"` is REINFORCE++ of papers'),
        ("reinforce", '`"reinforce_plus_plus"` is reinforce of OpenRLHF'),
        ("reinforce_baseline", '`"reinforce_plus_plus_baseline"` is reinforce_baseline of OpenRLHF'),
        ("dr_grpo", '`"grpo"` is dr_grpo (scale = "none") of OpenRLHF'),
        ("grpo_vectorized", '`"grpo"` is grpo_vectorized of verl'),
    ],
)
def test_estimator_of_another_system_is_translated(smallest: Path, name: str, says: str) -> None:
    assert refusal([smallest], [f"ppo.advantages.kind={name}"]).message.endswith(f"; {says}")


def test_estimator_name_is_rejected_for_other_keys(smallest: Path) -> None:
    with pytest.raises(RecipeError, match=r'`ppo\.policy_loss\.kind` is `"grpo"`: must be one of '):
        load([smallest], ["ppo.policy_loss.kind=grpo"])


@pytest.mark.parametrize(
    ("setting", "key", "what"),
    [
        ("cluster.async_ppo={size=8}", "cluster.async_ppo", "asynchronous training"),
        ("rollout.max_staleness=1", "rollout.max_staleness", "asynchronous training"),
        ("ppo.Critic_Free=true", "ppo.Critic_Free", "further algorithms without a critic"),
        ("cluster.async=true", "cluster.async", "asynchronous training"),
    ],
)
def test_table_of_planned_feature_is_reported_as_not_available_yet(
    smallest: Path, setting: str, key: str, what: str
) -> None:
    """The error is one sentence, without a list of all keys."""
    error = refusal([smallest], [setting])
    says = error.message
    assert says.startswith(f"--set: unknown key `{key}`; it is a known feature that is not available yet: {what}")
    assert len(says.splitlines()) == 1
    assert error.hint == "ppoctl recipes keys requires"


def test_limits_page_names_every_planned_capability() -> None:
    page = (QUICKSTART.parents[1] / "docs" / "limits.md").read_text("utf-8")
    assert [name for name in NOT_YET if f"`{name}`" not in page] == []


def test_published_recipe_with_sft_start_requires_without_flag() -> None:
    """Otherwise the run would miss its expectations by construction, after hours."""
    file = QUICKSTART.parent / "verl" / "gemma-2-2b-as-log.toml"
    recipe = load([file], (), {"PPOCTL_DATA": "/data"}).recipe
    with pytest.raises(RecipeError, match=r"`sft-start`.*`model\.path` names its result") as error:
        require_capable(recipe)
    assert error.value.hint == "--without sft-start  # accepts that the run deviates"
    sets = with_accepted(["model.path=/fine-tuned"], ["sft-start"])
    require_capable(load([file], sets, {"PPOCTL_DATA": "/data"}).recipe)
