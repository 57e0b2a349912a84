"""Files left to right, environment, `--set`: who wins, what merges, what replaces, and where each value came from."""

from pathlib import Path

import pytest
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    TomlConfigSettingsSource,
)

from ppoctl.errors import MissingAssetError, RecipeError
from ppoctl.loading.layers import EnvironmentLayer, FileLayer, Layers, SetLayer, WrittenRecipe
from ppoctl.loading.load import examine, from_resolved, load
from ppoctl.loading.write import recipe_as_toml
from ppoctl.recipe.schema import (
    BySequences,
    ByTokens,
    ClippedLoss,
    CriticModelTable,
    GaeAdvantages,
    GspoLoss,
    HealthRule,
    KlInLoss,
    MlflowTracking,
    NoKl,
    NoTracking,
    ParallelTable,
    Recipe,
)
from recipe.conftest import SMALLEST, Write


def test_each_layer_overrides_the_ones_before_it(write: Write) -> None:
    files = [write(SMALLEST), write("steps = 20\nseed = 1\n", "b.toml"), write("steps = 30\n", "c.toml")]
    environ = {"PPOCTL_STEPS": "40"}
    assert load(files, environ={}).recipe.steps == 30
    assert load(files[:2], environ={}).recipe.steps == 20
    assert load(files, environ=environ).recipe.steps == 40
    assert load(files, ["steps=50", "steps=60"], environ).recipe.steps == 60
    assert load(files, ["steps=50"], environ).recipe.seed == 1


def test_each_layer_is_a_source_of_pydantic_settings_and_the_strongest_is_read_first(write: Write) -> None:
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


def test_every_value_remembers_where_it_was_set(write: Write) -> None:
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


def test_another_alternative_replaces_the_whole_table(write: Write) -> None:
    first = write(SMALLEST + '[ppo.kl]\nplace = "reward"\nestimator = "k1"\ncoef = 0.5\n')
    second = write('[ppo.kl]\nplace = "loss"\ncoef = 0.1\n', "b.toml")
    assert load([first, second], environ={}).recipe.ppo.kl == KlInLoss(place="loss", coef=0.1)
    assert load([first, second], ["ppo.kl.place=none"], {}).recipe.ppo.kl == NoKl(place="none")


def test_a_table_without_a_kind_is_the_usual_one_and_gives_way_to_another(write: Write) -> None:
    clipped = write(SMALLEST + "[ppo.policy_loss]\nclip_high = 0.28\n")
    assert load([clipped], environ={}).recipe.ppo.policy_loss == ClippedLoss(clip_high=0.28)
    # Its bounds are of the clip's own size, which would be no clip at all in another kind.
    assert load([clipped], ["ppo.policy_loss.kind=gspo"], {}).recipe.ppo.policy_loss == GspoLoss(kind="gspo")


def test_a_key_that_is_set_without_a_kind_stays_with_the_kind_that_is_written(write: Write) -> None:
    written = write(SMALLEST + '[ppo.policy_loss]\nkind = "gspo"\nclip_high = 0.001\n')
    found = load([written], ["ppo.policy_loss.clip_high=0.002"], {}).recipe.ppo.policy_loss
    assert found == GspoLoss(kind="gspo", clip_high=0.002)


PARALLEL = SMALLEST + "[actor.parallel]\ntensor = 2\nsequence = true\n"


def test_a_layout_replaces_a_layout(write: Write) -> None:
    """A run of 2 tensor ranks that is resumed with `actor.parallel={pipeline=2}` has 2 processes, not 4."""
    base = write(PARALLEL, "base.toml")
    assert load([base], ["actor.parallel={pipeline=2}"]).recipe.actor.parallel == ParallelTable(pipeline=2)
    around = ["actor={optimizer={lr=1e-6}, parallel={pipeline=2}}"]
    assert load([base], around).recipe.actor.parallel == ParallelTable(pipeline=2)
    over = write("[actor.parallel]\ndata = 3\n", "over.toml")
    assert load([base, over]).recipe.actor.parallel == ParallelTable(data=3)
    assert load([base, over], ["actor.parallel.tensor=4"]).recipe.actor.parallel == ParallelTable(data=3, tensor=4)


def test_a_key_of_a_layout_changes_that_key(write: Write) -> None:
    base = write(PARALLEL, "base.toml")
    changed = ParallelTable(tensor=4, sequence=True)
    assert load([base], ["actor.parallel.tensor=4"]).recipe.actor.parallel == changed
    assert load([base], environ={"PPOCTL_ACTOR__PARALLEL__TENSOR": "4"}).recipe.actor.parallel == changed


def test_a_table_that_is_set_takes_the_place_of_the_whole_table(write: Write) -> None:
    """One rule: `--set TABLE={...}` replaces, `--set TABLE.KEY=VALUE` changes one key. What is left out has its
    default, not what a file says."""
    base = write(SMALLEST + '[expect]\n"reward/score_mean" = { min = 0.5 }\n[health.kl]\nmax = 0.1\n', "base.toml")
    one = load([base], ['expect."value/explained_variance".min=0', "health.kl.action=stop"]).recipe
    assert one.expect.keys() == {"reward/score_mean", "value/explained_variance"}
    assert one.health.kl == HealthRule(max=0.1, action="stop")
    whole = ['expect={"value/explained_variance"={min=0}}', "health.kl={action='stop'}"]
    variables = {"PPOCTL_EXPECT": whole[0].removeprefix("expect="), "PPOCTL_HEALTH__KL": "{action='stop'}"}
    for recipe in (load([base], whole, {}).recipe, load([base], (), variables).recipe):
        assert recipe.expect.keys() == {"value/explained_variance"}
        assert recipe.health.kl == HealthRule(max=0.5, action="stop")
    # A later setting is stronger than an earlier one.
    later = load([base], ['expect."reward/score_mean".max=1', whole[0]]).recipe
    assert later.expect.keys() == {"value/explained_variance"}


def test_an_empty_table_on_the_command_line_replaces_the_weaker_ones(write: Write) -> None:
    base = write(PARALLEL + '[expect]\n"reward/score_mean" = { min = 0.5 }\n', "base.toml")
    assert load([base]).recipe.expect.keys() == {"reward/score_mean"}
    emptied = load([base], ["expect={}", "actor.parallel={}"]).recipe
    assert (emptied.expect, emptied.actor.parallel) == ({}, ParallelTable())
    others = load([base], ["expect={}", 'expect."value/explained_variance".min=0']).recipe
    assert others.expect.keys() == {"value/explained_variance"}
    # In a file it may be a heading that nobody wrote anything under.
    assert load([base, write("[expect]\n", "over.toml")]).recipe.expect.keys() == {"reward/score_mean"}


def test_a_replaced_table_does_not_come_back_with_its_old_alternative(write: Write) -> None:
    first = write(SMALLEST + '[ppo.kl]\nplace = "loss"\nestimator = "k2"\ncoef = 0.5\n')
    second = write('[ppo.kl]\nplace = "none"\n', "b.toml")
    third = write('[ppo.kl]\nplace = "loss"\ncoef = 0.1\n', "c.toml")
    assert load([first, second, third], environ={}).recipe.ppo.kl == KlInLoss(place="loss", estimator="k3", coef=0.1)


def test_one_way_of_batching_replaces_the_other_and_shares_nothing_with_it(write: Write) -> None:
    first = write(SMALLEST + "[actor.batching]\nmicrobatch_seqs = 2\nlogits_chunk_tokens = 7\n")
    loaded = load([first], ["actor.batching.max_tokens_per_microbatch=64"], {})
    assert loaded.recipe.actor.batching == ByTokens(max_tokens_per_microbatch=64)


def test_a_set_value_is_toml_and_a_bare_word_is_text(smallest: Path) -> None:
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


def test_an_environment_variable_is_read_as_set_reads_its_value(smallest: Path) -> None:
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


def test_relative_paths_start_where_they_were_written(
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


def test_a_path_may_begin_with_a_variable(write: Write) -> None:
    text = SMALLEST.replace('"train.jsonl"', '"$ROWS/a.jsonl"').replace('"base"', '"${ROWS}/m"')
    recipe = load([write(text)], environ={"ROWS": "/data"}).recipe
    assert recipe.data.train.path == "/data/a.jsonl"
    assert recipe.model.path == "/data/m"


def test_a_path_that_is_replaced_needs_no_variable(write: Write) -> None:
    file = write(SMALLEST.replace('"train.jsonl"', '"$NOBODY/train.jsonl"'))
    assert load([file], ["data.train.path=/other.jsonl"], {}).recipe.data.train.path == "/other.jsonl"
    with pytest.raises(MissingAssetError, match="no `NOBODY`"):
        load([file], [], {})


def test_a_variable_that_another_layer_names_is_no_key(write: Write) -> None:
    file = write(SMALLEST)
    models = {"PPOCTL_MODELS": "/models"}
    for sets, environ in (
        (['model.path="${PPOCTL_MODELS}/x"'], models),
        ([], {**models, "PPOCTL_MODEL__PATH": "$PPOCTL_MODELS/x"}),
        ([], {**models, "PPOCTL_MODEL": '{path="$PPOCTL_MODELS/x"}'}),
    ):
        assert load([file], sets, environ).recipe.model.path == "/models/x"


def test_a_comment_names_no_variable(write: Write) -> None:
    file = write(f"# like $PPOCTL_STEPZ\n{SMALLEST}")
    with pytest.raises(RecipeError, match="unknown key `stepz`"):
        load([file], [], {"PPOCTL_STEPZ": "3"})


@pytest.mark.parametrize("setting", ["#a=1", "a", "=1", "a.=1", "[a]=1"])
def test_a_setting_without_a_key_is_refused(smallest: Path, setting: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load([smallest], [setting], {})
    assert f"`{setting}` is not KEY=VALUE with a dotted key" in caught.value.message


def test_a_model_is_a_hub_id_unless_its_first_part_is_a_folder_here(write: Write, tmp_path: Path) -> None:
    file = write(SMALLEST.replace('"base"', '"org/model-7B"'))
    assert load([file], environ={}).recipe.model.path == "org/model-7B"
    (tmp_path / "org").mkdir()
    assert load([file], environ={}).recipe.model.path == str(tmp_path / "org/model-7B")


def test_the_critics_model_may_be_written_as_its_path_alone(write: Write, tmp_path: Path) -> None:
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
    resolved["model"]["critic"] = str(tmp_path / "judge")  # what runs of before have
    assert from_resolved(resolved) == load([base], [], {}).recipe


def test_the_resolved_recipe_reads_back_equal(write: Write) -> None:
    file = write(SMALLEST + '[reward.scale]\nfrom = [0, 1]\nto = [-1, 1]\n[expect]\n"a/b" = {}\n')
    loaded, problems = examine([file], environ={}, judges=())
    assert loaded is not None
    assert not problems
    resolved = loaded.resolved()
    assert resolved["reward"]["scale"]["from"] == [0.0, 1.0]
    assert from_resolved(resolved) == loaded.recipe
    assert type(loaded.recipe) is Recipe
    assert set(loaded.origins) >= {"reward.scale.from", 'expect."a/b".min', "seed"}


def test_a_recipe_written_as_toml_reads_back_equal(write: Write) -> None:
    awkward = 'quote " and \\ tab \t bell \x07 del \x7f ' + "long " * 40
    loaded = load([write(SMALLEST)], [f"data.train.system={awkward}", "ppo.value_loss.clip=1e16"], {})
    again = load([write(recipe_as_toml(loaded.recipe), "again.toml")], environ={})
    assert again.recipe == loaded.recipe


def test_a_resolved_recipe_of_another_version_says_so(smallest: Path) -> None:
    resolved = load([smallest], environ={}).resolved()
    resolved["ppo"]["gone"] = 1
    with pytest.raises(RecipeError, match=r"unknown key `ppo.gone`") as caught:
        from_resolved(resolved)
    assert "version" in str(caught.value.hint)


def test_a_run_that_began_when_offload_was_a_switch_keeps_its_value(smallest: Path) -> None:
    resolved = load([smallest], environ={}).resolved()
    for was, roles in ((True, ("actor", "critic", "generator")), (False, ())):
        resolved["cluster"]["offload"] = was
        assert from_resolved(resolved).cluster.offload == roles


def test_to_set_one_key_of_a_table_leaves_its_other_defaults(smallest: Path) -> None:
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


def test_a_bound_can_be_taken_away_and_stays_away(smallest: Path, write: Write) -> None:
    recipe = load([smallest], ['health.kl.max="off"', "health.kl.min=0.1"], {}).recipe
    assert recipe.health.kl == HealthRule(min=0.1)
    assert load([write(recipe_as_toml(recipe), "kept.toml")], [], {}).recipe == recipe


def test_a_bound_that_is_off_is_no_text_to_the_rules_of_a_recipe_with_errors(smallest: Path) -> None:
    _, problems = examine([smallest], ['health.kl.max="off"', "health.kl.min=0.1", "steps=x"], {})
    assert [problem.message for problem in problems] == ['`steps` is `"x"`: must be a whole number']


def test_a_variable_is_merged_into_a_table_from_another_variable(smallest: Path) -> None:
    environ = {"PPOCTL_ACTOR__PARALLEL__TENSOR": "2", "PPOCTL_ACTOR__PARALLEL": "{data=2}"}
    loaded = load([smallest], environ=environ)
    assert loaded.recipe.actor.parallel == ParallelTable(tensor=2, data=2)
    assert loaded.origins["actor.parallel.tensor"] == "environment PPOCTL_ACTOR__PARALLEL__TENSOR"
    assert loaded.origins["actor.parallel.data"] == "environment PPOCTL_ACTOR__PARALLEL"


def test_a_variable_of_a_table_that_is_no_table_is_told_although_others_set_keys_inside(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_ROLLOUT": "x", "PPOCTL_ROLLOUT__MAX_NEW_TOKENS": "9"})
    assert [str(problem) for problem in problems] == [
        'environment PPOCTL_ROLLOUT: `rollout` is `"x"`: must be a table'
    ]


def test_what_a_table_of_a_variable_lacks_is_told_by_that_variable(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_PPO": "{}", "PPOCTL_PPO__VALUE_LOSS__CLIP": "0.2"})
    assert [problem.where for problem in problems] == ["environment PPOCTL_PPO"]


def test_names_in_a_table_of_a_variable_are_spelled_as_in_a_file(smallest: Path) -> None:
    _, problems = examine([smallest], [], {"PPOCTL_HEALTH__KL": "{Max = 1}"})
    assert [str(problem) for problem in problems] == [
        "environment PPOCTL_HEALTH__KL: unknown key `health.kl.Max`; did you mean `max`?"
    ]


def test_names_at_the_top_of_a_file_are_spelled_as_they_are(write: Write) -> None:
    _, problems = examine([write(SMALLEST.replace("steps", "Steps"))], [], {})
    assert "r.toml:2: unknown key `Steps`; did you mean `steps`?" in [str(problem) for problem in problems]


def test_a_text_needs_no_quotes_wherever_it_is_set(smallest: Path) -> None:
    """Else `name=$SLURM_JOB_ID` would be a number."""
    assert load([smallest], ["name=42"], {}).recipe.name == "42"
    assert load([smallest], [], {"PPOCTL_NAME": "42"}).recipe.name == "42"
    assert load([smallest], ['name="42"'], {}).recipe.name == "42"


def test_another_alternative_has_none_of_the_defaults(smallest: Path) -> None:
    recipe = load([smallest], ["actor.batching.microbatch_seqs=2", "tracking.kind=none"], {}).recipe
    assert recipe.actor.batching == BySequences(microbatch_seqs=2)
    assert recipe.tracking == NoTracking(kind="none")


def test_a_path_behind_a_variable_starts_where_the_command_was_typed(write: Write) -> None:
    file = write(SMALLEST.replace('"train.jsonl"', '"$PPOCTL_DATA/train.jsonl"'), "recipes/r.toml")
    recipe = load([file], [], {"PPOCTL_DATA": "folder"}).recipe
    assert recipe.data.train.path == str(Path.cwd() / "folder" / "train.jsonl")
    assert recipe.model.path == str(Path.cwd() / "recipes" / "base")
