"""Files from left to right, environment, `--set`: precedence, merging, replacement, and the origin of each value."""

from pathlib import Path

import pytest
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    TomlConfigSettingsSource,
)

from ppoctl.algorithms.estimators.gae import GaeAdvantages
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.stages.kl_table import KlInLoss, NoKl
from ppoctl.algorithms.stages.loss_tables import ClippedLoss, GspoLoss
from ppoctl.core.errors import MissingAssetError, RecipeError
from ppoctl.core.key_path import dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.model_tables import CriticModelTable
from ppoctl.recipe.loading.layers import EnvironmentLayer, FileLayer, Layers, SetLayer, WrittenRecipe
from ppoctl.recipe.loading.load import examine, from_resolved, load
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.recipe.schema import HealthRule, Recipe
from ppoctl.recipe.tracking_table import MlflowTracking, NoTracking
from recipe.conftest import SMALLEST, Write, refusal


def test_later_layer_overrides_earlier_layers(write: Write) -> None:
    files = [write(SMALLEST), write("steps = 20\nseed = 1\n", "b.toml"), write("steps = 30\n", "c.toml")]
    environ = {"PPOCTL_STEPS": "40"}
    assert load(files, environ={}).recipe.steps == 30
    assert load(files[:2], environ={}).recipe.steps == 20
    assert load(files, environ=environ).recipe.steps == 40
    assert load(files, ["steps=50", "steps=60"], environ).recipe.steps == 60
    assert load(files, ["steps=50"], environ).recipe.seed == 1


def test_layers_are_settings_sources_read_strongest_first(write: Write) -> None:
    files = (write(SMALLEST), write("steps = 20\n", "b.toml"))
    layers = Layers(files, ("steps=50",), {"PPOCTL_STEPS": "40"}, write("[slurm]\nnodes = 2\n", "site.toml"))
    layers.read()
    kinds = (SetLayer, EnvironmentLayer, FileLayer, FileLayer, FileLayer)
    assert tuple(map(type, layers.sources)) == kinds
    of_the_library = (InitSettingsSource, EnvSettingsSource, *(TomlConfigSettingsSource,) * 3)
    for source, kind in zip(layers.sources, of_the_library, strict=True):
        assert isinstance(source, kind)
    assert issubclass(WrittenRecipe, BaseSettings)
    assert [source.kept.get("steps") for source in layers.sources] == [50, None, None, None, None]
    assert [source.current_state.get("steps") for source in layers.sources] == [None, 50, 50, 50, 50]


def test_digest_has_the_origin_of_its_file(write: Write) -> None:
    file = "def twice(x: int) -> int: return x\nclass Guess: ...\ndef score(s): return 1.0\n"
    tools = write(file, "t.py").resolve()
    rows = f"{{ format = 'columns', path = '{tools}', prompt = 'q', fields = ['env'] }}"
    added = (
        "[environment]\nkind = 'choose'\nfield = 'env'\nturns = 2\ntokens = 9\n"
        "[environment.cases.a]\nkind = 'tools'\ntools = ['calculator', 't.py:twice']\n"
        "[environment.cases.b]\nkind = 'python'\npath = 't.py:Guess'\noptions = { digest = 1 }\n"
        "[reward]\nkind = 'python'\nfunction = 't.py:score'\n"
    )
    changed = [f"data.train={rows}", "rollout.max_new_tokens=9", f"data.eval.x={rows}"]
    origins = load([write(SMALLEST), write(added, "b.toml")], changed, {}).origins
    of_tool = dotted(("environment", "cases", "a", "digests", f"{tools}:twice"))
    assert origins[of_tool] == origins["environment.cases.a.tools"] == "b.toml:8"
    assert origins["environment.cases.b.digest"] == origins["environment.cases.b.path"] == "b.toml:11"
    assert origins["environment.cases.b.options.digest"] == "b.toml:12"
    assert origins["reward.digest"] == origins["reward.function"] == "b.toml:15"


def test_every_value_has_its_origin(write: Write) -> None:
    files = [
        write(SMALLEST),
        write('[ppo]\nkl = { place = "loss", coef = 0.1 }\n[model]\ndtype="float32"\n', "b.toml"),
    ]
    environ = {"PPOCTL_ACTOR__OPTIMIZER__LR": "3e-6", "PPOCTL_DATA": "/no/key"}
    loaded = load(files, ["rollout.temperature=0.5"], environ)
    assert loaded.origins["name"] == "r.toml:1"
    assert loaded.origins["model.path"] == "r.toml:4"
    assert loaded.origins["model.dtype"] == "b.toml:4"
    assert loaded.origins["ppo.kl.coef"] == "b.toml:2"
    assert loaded.origins["ppo.kl.estimator"] == "default"
    assert loaded.origins["actor.optimizer.lr"] == "environment PPOCTL_ACTOR__OPTIMIZER__LR"
    assert loaded.origins["rollout.temperature"] == "--set"
    assert loaded.origins["critic.optimizer.beta1"] == "default"
    assert loaded.recipe.actor.optimizer.lr == 3e-6


def test_tables_merge_key_by_key(write: Write) -> None:
    overlay = write("[rollout]\nmax_new_tokens = 9\n[data.eval.more]\nformat='gsm8k'\npath='m.jsonl'\n", "b.toml")
    recipe = load([write(SMALLEST), overlay], environ={}).recipe
    assert (recipe.rollout.max_new_tokens, recipe.rollout.max_prompt_tokens) == (9, 20)
    assert list(recipe.data.eval) == ["more"]


def test_other_alternative_replaces_whole_table(write: Write) -> None:
    first = write(SMALLEST + '[ppo.kl]\nplace = "reward"\nestimator = "k1"\ncoef = 0.5\n')
    second = write('[ppo.kl]\nplace = "loss"\ncoef = 0.1\n', "b.toml")
    assert load([first, second], environ={}).recipe.ppo.kl == KlInLoss(place="loss", coef=0.1)
    assert load([first, second], ["ppo.kl.place=none"], {}).recipe.ppo.kl == NoKl(place="none")


def test_table_without_kind_is_default_kind_and_is_replaced(write: Write) -> None:
    clipped = write(SMALLEST + "[ppo.policy_loss]\nclip_high = 0.28\n")
    assert load([clipped], environ={}).recipe.ppo.policy_loss == ClippedLoss(clip_high=0.28)
    # Its bounds are relative to the clip's own size, so in another kind they would not clip at all.
    assert load([clipped], ["ppo.policy_loss.kind=gspo"], {}).recipe.ppo.policy_loss == GspoLoss(kind="gspo")


def test_key_set_without_kind_changes_table_of_written_kind(write: Write) -> None:
    written = write(SMALLEST + '[ppo.policy_loss]\nkind = "gspo"\nclip_high = 0.001\n')
    loss = load([written], ["ppo.policy_loss.clip_high=0.002"], {}).recipe.ppo.policy_loss
    assert loss == GspoLoss(kind="gspo", clip_high=0.002)


PARALLEL = SMALLEST + "[actor.parallel]\ntensor = 2\nsequence = true\n"


def test_layout_table_replaces_layout_table(write: Write) -> None:
    """A run with 2 tensor ranks that is resumed with `actor.parallel={pipeline=2}` has 2 processes, not 4."""
    base = write(PARALLEL, "base.toml")
    assert load([base], ["actor.parallel={pipeline=2}"]).recipe.actor.parallel == ParallelTable(pipeline=2)
    around = ["actor={optimizer={lr=1e-6}, parallel={pipeline=2}}"]
    assert load([base], around).recipe.actor.parallel == ParallelTable(pipeline=2)
    over = write("[actor.parallel]\ndata = 3\n", "over.toml")
    assert load([base, over]).recipe.actor.parallel == ParallelTable(data=3)
    assert load([base, over], ["actor.parallel.tensor=4"]).recipe.actor.parallel == ParallelTable(data=3, tensor=4)


def test_layout_key_changes_only_that_key(write: Write) -> None:
    base = write(PARALLEL, "base.toml")
    changed = ParallelTable(tensor=4, sequence=True)
    assert load([base], ["actor.parallel.tensor=4"]).recipe.actor.parallel == changed
    assert load([base], environ={"PPOCTL_ACTOR__PARALLEL__TENSOR": "4"}).recipe.actor.parallel == changed


def test_table_set_on_command_line_replaces_whole_table(write: Write) -> None:
    """`--set TABLE={...}` replaces the table; `--set TABLE.KEY=VALUE` changes one key. Omitted keys get their
    defaults, not the values of a file."""
    base = write(SMALLEST + '[expect]\n"reward/score_mean" = { min = 0.5 }\n[health.kl]\nmax = 0.1\n', "base.toml")
    recipe = load([base], ['expect."value/explained_variance".min=0', "health.kl.action=stop"]).recipe
    assert recipe.expect.keys() == {"reward/score_mean", "value/explained_variance"}
    assert recipe.health.kl == HealthRule(max=0.1, action="stop")
    whole = ['expect={"value/explained_variance"={min=0}}', "health.kl={action='stop'}"]
    variables = {"PPOCTL_EXPECT": whole[0].removeprefix("expect="), "PPOCTL_HEALTH__KL": "{action='stop'}"}
    for recipe in (load([base], whole, {}).recipe, load([base], (), variables).recipe):
        assert recipe.expect.keys() == {"value/explained_variance"}
        assert recipe.health.kl == HealthRule(max=0.5, action="stop")
    # A later setting takes precedence over an earlier one.
    later = load([base], ['expect."reward/score_mean".max=1', whole[0]]).recipe
    assert later.expect.keys() == {"value/explained_variance"}


def test_empty_table_on_command_line_clears_weaker_tables(write: Write) -> None:
    base = write(PARALLEL + '[expect]\n"reward/score_mean" = { min = 0.5 }\n', "base.toml")
    assert load([base]).recipe.expect.keys() == {"reward/score_mean"}
    emptied = load([base], ["expect={}", "actor.parallel={}"]).recipe
    assert (emptied.expect, emptied.actor.parallel) == ({}, ParallelTable())
    others = load([base], ["expect={}", 'expect."value/explained_variance".min=0']).recipe
    assert others.expect.keys() == {"value/explained_variance"}
    # In a file, the table may be a heading without keys.
    assert load([base, write("[expect]\n", "over.toml")]).recipe.expect.keys() == {"reward/score_mean"}


def test_replaced_alternative_does_not_restore_old_values(write: Write) -> None:
    first = write(SMALLEST + '[ppo.kl]\nplace = "loss"\nestimator = "k2"\ncoef = 0.5\n')
    second = write('[ppo.kl]\nplace = "none"\n', "b.toml")
    third = write('[ppo.kl]\nplace = "loss"\ncoef = 0.1\n', "c.toml")
    assert load([first, second, third], environ={}).recipe.ppo.kl == KlInLoss(place="loss", estimator="k3", coef=0.1)


def test_other_batching_kind_replaces_all_its_keys(write: Write) -> None:
    first = write(SMALLEST + "[actor.batching]\nmicrobatch_seqs = 2\nlogits_chunk_tokens = 7\n")
    loaded = load([first], ["actor.batching.max_tokens_per_microbatch=64"], {})
    assert loaded.recipe.actor.batching == ByTokens(max_tokens_per_microbatch=64)


def test_set_value_is_parsed_as_toml_or_bare_text(smallest: Path) -> None:
    sets = [
        "name=other",
        "reward.strict=false",
        'rollout.stop_strings=["a=b", "\\n"]',
        "reward.scale={from=[0, 1], to=[-1, 1]}",
        'expect."reward/score_mean".min=0.5',
        "ppo.value_loss.clip=0.2",
    ]
    recipe = load([smallest], sets, {}).recipe
    assert recipe.name == "other"
    assert recipe.reward.strict is False
    assert recipe.rollout.stop_strings == ("a=b", "\n")
    assert recipe.reward.scale is not None
    assert recipe.reward.scale.from_ == (0, 1)
    assert recipe.expect["reward/score_mean"].min == 0.5
    assert recipe.ppo.value_loss.clip == 0.2


def test_environment_value_is_parsed_like_set_value(smallest: Path) -> None:
    environ = {
        "PPOCTL_NAME": "42",
        "PPOCTL_REWARD__STRICT": "false",
        "PPOCTL_HEALTH__KL__MAX": "0.25",
        "PPOCTL_ROLLOUT__STOP_STRINGS": '["x"]',
        "PPOCTL_REWARD__SCALE__FROM": "[0, 2]",
        "PPOCTL_REWARD__SCALE__TO": "[0, 1]",
        "PPOCTL_PPO__KL__PLACE": "loss",
        "PPOCTL_PPO__KL__COEF": "0.125",
        "PPOCTL_DATA__TRAIN__MAX_ROWS": "7",
    }
    recipe = load([smallest], environ=environ).recipe
    assert recipe.name == "42"
    assert recipe.reward.strict is False
    assert recipe.health.kl.max == 0.25
    assert recipe.rollout.stop_strings == ("x",)
    assert recipe.reward.scale is not None
    assert recipe.reward.scale.from_ == (0, 2)
    assert recipe.ppo.kl == KlInLoss(place="loss", coef=0.125)
    assert recipe.data.train.max_rows == 7


def test_relative_path_is_resolved_from_folder_of_its_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cwd").mkdir()
    write(SMALLEST, "base/r.toml")
    write('[data.train]\npath = "../rows.jsonl"\n', "over/b.toml")
    monkeypatch.chdir(tmp_path / "cwd")
    files = [Path("../base/r.toml"), Path("../over/b.toml")]
    loaded = load(files, ["data.eval.e={format='gsm8k', path='e.jsonl'}"], {})
    assert loaded.recipe.model.path == str(tmp_path / "base/base")
    assert loaded.recipe.data.train.path == str(tmp_path / "rows.jsonl")
    assert loaded.recipe.data.eval["e"].path == str(tmp_path / "cwd/e.jsonl")


def test_path_may_start_with_variable(write: Write) -> None:
    text = SMALLEST.replace('"train.jsonl"', '"$ROWS/a.jsonl"').replace('"base"', '"${ROWS}/m"')
    recipe = load([write(text)], environ={"ROWS": "/data"}).recipe
    assert recipe.data.train.path == "/data/a.jsonl"
    assert recipe.model.path == "/data/m"


def test_replaced_path_does_not_require_its_variable(write: Write) -> None:
    file = write(SMALLEST.replace('"train.jsonl"', '"$NOBODY/train.jsonl"'))
    assert load([file], ["data.train.path=/other.jsonl"], {}).recipe.data.train.path == "/other.jsonl"
    with pytest.raises(MissingAssetError, match="`NOBODY` is not set"):
        load([file], [], {})


def test_variable_used_by_other_layer_is_not_a_key(write: Write) -> None:
    file = write(SMALLEST)
    models = {"PPOCTL_MODELS": "/models"}
    for sets, environ in (
        (['model.path="${PPOCTL_MODELS}/x"'], models),
        ([], {**models, "PPOCTL_MODEL__PATH": "$PPOCTL_MODELS/x"}),
        ([], {**models, "PPOCTL_MODEL": '{path="$PPOCTL_MODELS/x"}'}),
    ):
        assert load([file], sets, environ).recipe.model.path == "/models/x"
    over = write('[model]\npath = "$PPOCTL_MODELS/x"\n', "over.toml")
    assert load([file, over], (), models).recipe.model.path == "/models/x"


def test_variable_in_comment_is_not_used(write: Write) -> None:
    file = write(f"# like $PPOCTL_STEPZ\n{SMALLEST}")
    with pytest.raises(RecipeError, match="unknown key `stepz`"):
        load([file], [], {"PPOCTL_STEPZ": "3"})


@pytest.mark.parametrize("setting", ["#a=1", "a", "=1", "a.=1", "[a]=1"])
def test_set_without_key_raises(smallest: Path, setting: str) -> None:
    assert f"`{setting}` is not KEY=VALUE with a dotted key" in refusal([smallest], [setting], {}).message


def test_model_path_is_hub_id_unless_first_part_is_a_folder(write: Write, tmp_path: Path) -> None:
    file = write(SMALLEST.replace('"base"', '"org/model-7B"'))
    assert load([file], environ={}).recipe.model.path == "org/model-7B"
    (tmp_path / "org").mkdir()
    assert load([file], environ={}).recipe.model.path == str(tmp_path / "org/model-7B")


def test_critic_model_may_be_written_as_path(write: Write, tmp_path: Path) -> None:
    base = write(SMALLEST.replace('path = "base"', 'path = "base"\ncritic = "judge"'))
    (tmp_path / "judge").mkdir()
    loaded = load([base], ["model.critic.dtype=float32"], {})
    assert loaded.recipe.model.critic == CriticModelTable(path=str(tmp_path / "judge"), dtype="float32")
    line = base.read_text("utf-8").splitlines().index('critic = "judge"') + 1
    assert loaded.origins["model.critic.path"] == f"{base}:{line}"
    assert load([base], ["model.critic=org/other"], {}).origins["model.critic.path"] == "--set"
    sets = ["model.critic.dtype=float32", "model.critic=org/other"]
    for order in (sets, sets[::-1]):
        assert load([base], order, {}).recipe.model.critic == CriticModelTable(path="org/other", dtype="float32")
    resolved = load([base], [], {}).resolved()
    assert resolved["model"]["critic"] == {"path": str(tmp_path / "judge"), "dtype": None}
    resolved["model"]["critic"] = str(tmp_path / "judge")  # as in runs of earlier versions
    assert from_resolved(resolved) == load([base], [], {}).recipe


def test_resolved_recipe_round_trips(write: Write) -> None:
    file = write(SMALLEST + '[reward.scale]\nfrom = [0, 1]\nto = [-1, 1]\n[expect]\n"a/b" = {}\n')
    loaded, problems = examine([file], environ={}, judges=())
    assert loaded is not None
    assert not problems
    resolved = loaded.resolved()
    assert resolved["reward"]["scale"]["from"] == [0.0, 1.0]
    assert from_resolved(resolved) == loaded.recipe
    assert type(loaded.recipe) is Recipe
    assert set(loaded.origins) >= {"reward.scale.from", 'expect."a/b".min', "seed"}


def test_recipe_written_as_toml_round_trips(write: Write) -> None:
    awkward = 'quote " and \\ tab \t bell \x07 del \x7f ' + "long " * 40
    loaded = load([write(SMALLEST)], [f"data.train.system={awkward}", "ppo.value_loss.clip=1e16"], {})
    reloaded = load([write(recipe_as_toml(loaded.recipe), "again.toml")], environ={})
    assert reloaded.recipe == loaded.recipe


def test_unknown_key_of_resolved_recipe_hints_at_version(smallest: Path) -> None:
    resolved = load([smallest], environ={}).resolved()
    resolved["ppo"]["gone"] = 1
    with pytest.raises(RecipeError, match=r"unknown key `ppo.gone`") as caught:
        from_resolved(resolved)
    assert "version" in str(caught.value.hint)


def test_boolean_offload_of_old_run_is_converted_to_roles(smallest: Path) -> None:
    resolved = load([smallest], environ={}).resolved()
    for was, roles in ((True, ("actor", "critic", "generator")), (False, ())):
        resolved["cluster"]["offload"] = was
        assert from_resolved(resolved).cluster.offload == roles


def test_setting_one_key_keeps_other_defaults_of_table(smallest: Path) -> None:
    sets = [
        "ppo.advantages.gae_lambda=0.95",
        "tracking.uri=x",
        "actor.batching.logits_chunk_tokens=8",
        "health.kl.action=stop",
        "health.explained_variance.min=0.25",
        "health.truncated.min=0.1",
    ]
    loaded = load([smallest], sets, {})
    recipe = loaded.recipe
    assert recipe.ppo.advantages == GaeAdvantages(kind="gae", gae_lambda=0.95)
    assert recipe.tracking == MlflowTracking(kind="mlflow", uri="x")
    assert recipe.actor.batching == ByTokens(max_tokens_per_microbatch=16384, logits_chunk_tokens=8)
    assert recipe.health.kl == HealthRule(max=0.5, action="stop")
    assert recipe.health.explained_variance == HealthRule(min=0.25, from_step=10, for_steps=3)
    assert recipe.health.truncated == HealthRule(min=0.1, max=0.5)
    assert (loaded.origins["health.kl.max"], loaded.origins["health.kl.action"]) == ("default", "--set")


def test_health_bound_set_to_off_stays_off(smallest: Path, write: Write) -> None:
    recipe = load([smallest], ['health.kl.max="off"', "health.kl.min=0.1"], {}).recipe
    assert recipe.health.kl == HealthRule(min=0.1)
    assert load([write(recipe_as_toml(recipe), "kept.toml")], [], {}).recipe == recipe


def test_bound_set_to_off_is_accepted_next_to_other_errors(smallest: Path) -> None:
    _, problems = examine([smallest], ['health.kl.max="off"', "health.kl.min=0.1", "steps=x"], {})
    assert [problem.what for problem in problems] == ['`steps` is `"x"`: must be a whole number']


def test_variable_of_key_merges_with_variable_of_table(smallest: Path) -> None:
    environ = {"PPOCTL_ACTOR__PARALLEL__TENSOR": "2", "PPOCTL_ACTOR__PARALLEL": "{data=2}"}
    loaded = load([smallest], environ=environ)
    assert loaded.recipe.actor.parallel == ParallelTable(tensor=2, data=2)
    assert loaded.origins["actor.parallel.tensor"] == "environment PPOCTL_ACTOR__PARALLEL__TENSOR"
    assert loaded.origins["actor.parallel.data"] == "environment PPOCTL_ACTOR__PARALLEL"


def test_scalar_table_variable_is_reported_despite_nested_variables(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_ROLLOUT": "x", "PPOCTL_ROLLOUT__MAX_NEW_TOKENS": "9"})
    assert [str(problem) for problem in problems] == [
        'environment PPOCTL_ROLLOUT: `rollout` is `"x"`: must be a table'
    ]


def test_missing_keys_are_reported_at_table_variable(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_PPO": "{}", "PPOCTL_PPO__VALUE_LOSS__CLIP": "0.2"})
    assert [problem.where for problem in problems] == ["environment PPOCTL_PPO"]


def test_keys_in_table_variable_are_case_sensitive(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_HEALTH__KL": "{Max = 1}"})
    assert [str(problem) for problem in problems] == [
        "environment PPOCTL_HEALTH__KL: unknown key `health.kl.Max`; did you mean `max`?"
    ]


def test_top_level_keys_of_file_are_case_sensitive(write: Write) -> None:
    _, problems = examine([write(SMALLEST.replace("steps", "Steps"))], [], {})
    assert "r.toml:2: unknown key `Steps`; did you mean `steps`?" in [str(problem) for problem in problems]


def test_text_value_needs_no_quotes_in_set_or_environment(smallest: Path) -> None:
    """Otherwise `name=$SLURM_JOB_ID` would become a number."""
    assert load([smallest], ["name=42"], {}).recipe.name == "42"
    assert load([smallest], [], {"PPOCTL_NAME": "42"}).recipe.name == "42"
    assert load([smallest], ['name="42"'], {}).recipe.name == "42"


def test_other_alternative_uses_none_of_the_defaults(smallest: Path) -> None:
    recipe = load([smallest], ["actor.batching.microbatch_seqs=2", "tracking.kind=none"], {}).recipe
    assert recipe.actor.batching == BySequences(microbatch_seqs=2)
    assert recipe.tracking == NoTracking(kind="none")


def test_path_from_variable_starts_at_working_directory(write: Write) -> None:
    file = write(SMALLEST.replace('"train.jsonl"', '"$PPOCTL_DATA/train.jsonl"'), "recipes/r.toml")
    recipe = load([file], [], {"PPOCTL_DATA": "folder"}).recipe
    assert recipe.data.train.path == str(Path.cwd() / "folder" / "train.jsonl")
    assert recipe.model.path == str(Path.cwd() / "recipes" / "base")
