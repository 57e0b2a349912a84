"""The output for a wrong recipe: exact transcripts of all problems and the hint."""

import re
from pathlib import Path

import pytest

from conventions.conftest import ROOT
from ppoctl.core.errors import ExitCode, MissingAssetError
from ppoctl.models.head import SharedValueHead
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.layers import NESTED, NO_KEYS, PREFIX
from ppoctl.recipe.loading.layers import ROOT as ROOT_TABLE
from ppoctl.recipe.loading.load import load
from recipe.conftest import SMALLEST, Write, refusal


def said(
    *files: Path, sets: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> tuple[list[str], str | None]:
    caught = refusal(files, sets, environ or {})
    assert caught.exit_code == ExitCode.USAGE == 2
    return caught.message.splitlines(), caught.hint


FORMATS = '`"gsm8k"`, `"columns"`, `"verl"`, `"dialogues"`, `"python"`, `"mix"`'


def test_errors_of_all_layers_are_reported_in_one_pass(write: Write) -> None:
    file = write("""\
name = "bad run"
[model]
path = "base"
dtype = "float16"
steps = 30
[data.train]
format = "gsm8"
path = "train.jsonl"
[rollout]
prompts_per_step = "32"
max_prompt_tokens = 20.5
temprature = 1.0
[reward]
kind = "gsm8k"
strict = 1
scale = { from = [0, 1, 2], to = [1] }
[ppo]
epochs = 0
minibatch_seqs = 2
critic = { epochs = 1 }
[ppo.kl]
place = "none"
coef = 0.1
[ppo.policy_loss]
clip_low = nan
[actor.optimizer]
learning_rate = 1e-4
[actor.batching]
microbatch_seqs = 4
max_tokens_per_microbatch = 100
[tracking]
uri = "x"
[expect]
"reward/score_men" = { min = 1 }
""")
    lines, hint = said(file, sets=("ppo.kl.x", "nothing=1"), environ={"PPOCTL_SEED": "-1", "PPOCTL_ACTR__LR": "1"})
    top = "`name`, `seed`, `steps`, `epochs`, `requires`, `without`, `model`, `data`, `rollout`, `environment`, "
    top += "`reward`, `ppo`, `actor`, `critic`, `generator`, `checkpoint`, `eval`, `health`, `tracking`, `cluster`, "
    top += "`slurm`, `expect`, `until`"
    name = "must be letters, digits, `.`, `_` and `-`, and begin with a letter or digit"
    first = "before the first [section]"
    assert lines == [
        "--set: `ppo.kl.x` is not KEY=VALUE with a dotted key",
        f'r.toml:1: `name` is `"bad run"`: {name}',
        'r.toml:4: `model.dtype` is `"float16"`: must be one of `"float32"`, `"bfloat16"`; did you mean `bfloat16`?',
        f"r.toml:5: unknown key `model.steps`; `steps` belongs at the top of the file, {first}",
        f'r.toml:7: `data.train.format` is `"gsm8"`: must be one of {FORMATS}; did you mean `gsm8k`?',
        "r.toml:9: missing `rollout.max_new_tokens`; add it under [rollout], e.g. `max_new_tokens = 1024`",
        'r.toml:10: `rollout.prompts_per_step` is `"32"`: must be a whole number',
        "r.toml:11: `rollout.max_prompt_tokens` is `20.5`: must be a whole number",
        "r.toml:12: unknown key `rollout.temprature`; did you mean `temperature`?",
        "r.toml:15: `reward.strict` is `1`: must be `true` or `false`",
        "r.toml:16: `reward.scale.from` is `[0, 1, 2]`: must have 2 entries",
        "r.toml:16: `reward.scale.to` is `[1]`: must have more entries",
        "r.toml:18: `ppo.epochs` is `0`: must be at least 1",
        "r.toml:20: unknown key `ppo.critic`; [critic] is a table at the top of a recipe",
        'r.toml:23: `ppo.kl.coef` requires `place = "reward"` or `place = "loss"`, but `ppo.kl.place` is `"none"`',
        "r.toml:25: `ppo.policy_loss.clip_low` is `nan`: must be finite",
        "r.toml:26: missing `actor.optimizer.lr`; add it under [actor.optimizer], e.g. `lr = 1e-6`",
        "r.toml:27: unknown key `actor.optimizer.learning_rate`; a suggestion: TRL's `learning_rate` is "
        "`actor.optimizer.lr` and `critic.optimizer.lr` in ppoctl: one rate for both in TRL",
        "r.toml:29: `actor.batching.microbatch_seqs` excludes `max_tokens_per_microbatch`: keep one of them",
        "environment PPOCTL_SEED: `seed` is `-1`: must be at least 0",
        f"r.toml: missing `steps`; add it at the top of the file, {first}, e.g. `steps = 100`"
        " or, to count in passes over the rows, `epochs = 1`",
        "environment PPOCTL_ACTR__LR: unknown key `actr`; did you mean `actor`?",
        f"--set: unknown key `nothing`; the top of a recipe has {top}",
        "missing table [critic], which the advantages train; it needs `critic.optimizer.lr`: `ppo.advantages.kind` = "
        '`"gae"` (default)',
        "r.toml:34: no metric is called `reward/score_men`; did you mean `reward/score_mean`?",
    ]
    assert hint == "write it as `--set actor.optimizer.lr=1e-6`"


def test_errors_of_pasted_keys_follow_the_lines_of_their_file(write: Write) -> None:
    """The order of the schema would be another: `name`, `trainer`, `data`, `actor_rollout_ref`."""
    pasted = """[actor_rollout_ref.actor]
ppo_epochs = 1
[data]
train_files = "t.parquet"
prompt_key = "prompt"
[trainer]
total_epochs = 15
experiment_name = "x"
[algorithm]
lam = 1
"""
    lines, _ = said(write(pasted, "pasted.toml"))
    of_lines = [line for line in lines if line.removeprefix("pasted.toml:")[0].isdigit()]
    numbers = [int(line.split(":")[1]) for line in of_lines]
    assert numbers == sorted(numbers)
    assert {2, 4, 5, 7, 8, 10} <= {*numbers}
    assert lines[: len(of_lines)] == of_lines  # keys that are missing at the top of the recipe come after them
    [steps] = [line for line in lines if "missing `steps`" in line]
    assert steps.endswith("e.g. `steps = 100` or, to count in passes over the rows, `epochs = 1`")
    rows = [line for line in lines if "`data.train_files`" in line or "`data.prompt_key`" in line]
    assert len(rows) == 2
    assert all('`data.train.format = "verl"`' in row for row in rows)


def test_names_of_tools_and_environments_are_explained(write: Write) -> None:
    environment = "[environment]\nturns = 2\ntokens = 99\n"
    lines, _ = said(write(SMALLEST + environment + 'kind = "tools"\ntools = ["calculater"]\n'))
    known = "must be `calculator`, `python`, or `path.py:name` of a function; did you mean `calculator`?"
    assert [line.partition(": ")[2] for line in lines] == [f'`environment.tools.0` is `"calculater"`: {known}']
    lines, _ = said(write(SMALLEST + environment + 'kind = "python"\npath = "env.py"\n'))
    named = "does not name a class or async function; write `env.py:Environment`"
    assert [line.partition(": ")[2] for line in lines] == [f'`environment.path` is `"env.py"`: {named}']


def test_misplaced_key_error_names_its_section(write: Write) -> None:
    lines, hint = said(write(SMALLEST.replace("[ppo]\n", "[ppo]\nlr = 1e-6\n")))
    assert lines == ["r.toml:15: unknown key `ppo.lr`; `lr` belongs under [actor.optimizer] or [critic.optimizer]"]
    assert hint == "ppoctl recipes keys ppo"


def test_key_of_other_system_is_translated(write: Write) -> None:
    lines, _ = said(write(SMALLEST.replace("[ppo]\n", "[ppo]\nmini_batch_size = 2\nbatch_size = 4\n")))
    assert lines == [
        "r.toml:15: unknown key `ppo.mini_batch_size`; did you mean `minibatch_seqs`?",
        "r.toml:16: unknown key `ppo.batch_size`; a suggestion: TRL's `batch_size` is `rollout.prompts_per_step` "
        "in ppoctl",
    ]


BROUGHT = [
    (
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "it is a key of verl; use `ppo.policy_loss.clip_high`: 0.2 in verl and in ppoctl; DAPO uses 0.28",
        "ppoctl recipes keys ppo.policy_loss.clip_high",
    ),
    (
        "ppo.reward_scaling.enabled=false",
        "it is a key of NeMo-RL; use `reward.scale`: on if the table is written; its value is `false`, so leave "
        "it out",
        "ppoctl recipes keys reward.scale",
    ),
    (
        "loss_fn.reference_policy_kl_penalty=0",
        "it is a key of NeMo-RL; use `ppo.kl.coef`: in the loss unless `use_kl_in_reward` is set: write "
        "`ppo.kl.place` too; its value is `0`, so leave it out",
        "ppoctl recipes keys ppo.kl.coef",
    ),
    (
        "ppo.async_ppo.enabled=true",
        "it is a key of NeMo-RL; use `rollout.ahead`: true is 1: responses are at most one update old",
        "ppoctl recipes keys rollout.ahead",
    ),
    # Similar to `epochs`, but not a misspelling: it is a complete key of another system.
    ("ppo_epochs=4", "it is a key of TRL; use `ppo.epochs`: 4 in TRL, 1 in ppoctl", "ppoctl recipes keys ppo.epochs"),
    ("ent_coef=0.1", "it is a key of other systems; use `ppo.policy_loss.entropy_coef`", None),
    ("ppo.ent_coef=1", "a suggestion: `ent_coef` of other systems is `ppo.policy_loss.entropy_coef` in ppoctl", None),
]


@pytest.mark.parametrize(("setting", "says", "hint"), BROUGHT, ids=[setting for setting, _, _ in BROUGHT])
def test_foreign_key_error_names_our_equivalent(smallest: Path, setting: str, says: str, hint: str | None) -> None:
    lines, hinted = said(smallest, sets=(setting,))
    assert lines == [f"--set: unknown key `{setting.partition('=')[0]}`; {says}"]
    assert hint is None or hinted == hint


def test_foreign_keys_are_mapped_at_their_lines(write: Write) -> None:
    lines, _ = said(
        write(
            SMALLEST
            + """\
[algorithm]
gamma = 0.99
kl_ctrl = { type = "adaptive", mystery = 1 }
[value.megatron_cfg.optimizer]
lr = 2e-6
"""
        )
    )
    assert [line for line in lines if "kl_ctrl.type" not in line] == [
        "r.toml:21: unknown key `algorithm.gamma`; it is a key of verl; use `ppo.advantages.gamma`",
        "r.toml:22: unknown key `algorithm.kl_ctrl.mystery`",
        "r.toml:24: unknown key `value.megatron_cfg.optimizer.lr`; it is a key of NeMo-RL; use `critic.optimizer.lr`",
    ]


def test_own_key_of_other_alternative_is_not_treated_as_foreign(smallest: Path) -> None:
    lines, _ = said(smallest, sets=("ppo.kl={place='none', estimator='k1'}",))
    assert lines == [
        '--set: `ppo.kl.estimator` requires `place = "reward"` or `place = "loss"`, but `ppo.kl.place` is `"none"`'
    ]


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (
            "{kind='gpso'}",
            '`ppo.policy_loss.kind` is `"gpso"`: must be one of `"clip"`, `"gspo"`, `"cispo"`, `"reinforce"`, '
            '`"python"`; did you mean `gspo`?',
        ),
        (
            "{kind='gspo', dual_clip=3.0}",
            '`ppo.policy_loss.dual_clip` requires `kind = "clip"`, but `ppo.policy_loss.kind` is `"gspo"`',
        ),
        (
            "{ratio_gradient='token'}",
            '`ppo.policy_loss.ratio_gradient` requires `kind = "gspo"`, but `ppo.policy_loss.kind` is `"clip"`',
        ),
        ("3", '[ppo.policy_loss] needs `kind`: one of `"clip"`, `"gspo"`, `"cispo"`, `"reinforce"`, `"python"`'),
    ],
)
def test_wrong_policy_loss_error_names_alternatives(smallest: Path, table: str, line: str) -> None:
    lines, _ = said(smallest, sets=(f"ppo.policy_loss={table}",))
    assert lines == [f"--set: {line}"]


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("critic={on='actr'}", '`critic.on` is `"actr"`: must be `"actor"`; did you mean `actor`?'),
        ("critic={on='actor', optimizer={lr=1}}", "`critic.optimizer` excludes `critic.on`: keep one of them"),
        ("critic.head=mlp", '`critic.head` requires `on = "actor"`, but `critic.on` is not written'),
        ("critic={on='actor', layers_copied=-1}", "`critic.layers_copied` is `-1`: must be at least 0"),
        ("critic=3", "`critic` is `3`: must be a table"),
    ],
)
def test_keys_of_the_other_table_of_the_critic_are_refused(smallest: Path, setting: str, line: str) -> None:
    lines, _ = said(smallest, sets=(setting,))
    assert lines == [f"--set: {line}"]


def test_value_head_replaces_the_critic_of_an_earlier_file(smallest: Path, write: Write) -> None:
    later = write('[critic]\non = "actor"\nhead = "mlp"\n', "later.toml")
    recipe = load([smallest, later], (), {}).recipe
    assert (recipe.value_head, list(recipe.trained)) == (SharedValueHead("mlp"), ["actor"])


def test_missing_choice_error_lists_alternatives(write: Write) -> None:
    lines, _ = said(write(SMALLEST.replace('[reward]\nkind = "gsm8k"\n', "")))
    (line,) = lines
    assert line.startswith('r.toml: missing table [reward]; its `kind` is one of `"gsm8k"`, `"math"`, ')
    assert line.endswith(', e.g. `kind = "gsm8k"`')
    lines, _ = said(write(SMALLEST.replace('format = "gsm8k"\n', "")))
    assert lines == [f"r.toml:5: [data.train] needs `format`: one of {FORMATS}"]


def test_forward_batch_limits_of_both_kinds_conflict(write: Write) -> None:
    both = "max_tokens_per_microbatch = 64\nforward_max_tokens_per_microbatch = 64\nforward_microbatch_seqs = 4\n"
    lines, _ = said(write(SMALLEST + f"[actor.batching]\n{both}"))
    rivals = "`max_tokens_per_microbatch`, `forward_max_tokens_per_microbatch`: keep one of them"
    assert lines == [f"r.toml:23: `actor.batching.forward_microbatch_seqs` excludes {rivals}"]


def test_value_instead_of_table_and_reverse_are_reported(write: Write) -> None:
    text = SMALLEST.replace("[ppo]\n", "[ppo]\nkl = 3\nadvantages = 1\nepochs = { a = 1 }\n")
    lines, _ = said(write(text + "[data.eval]\nx = 1\n[model.dtype]\n"))
    assert lines == [
        "r.toml:15: `ppo.kl` is `3`: must be a table",
        "r.toml:16: `ppo.advantages` is `1`: must be a table",
        "r.toml:17: `ppo.epochs` is `{a = 1}`: must be a whole number",
        "r.toml:24: `data.eval.x` is `1`: must be a table",
        'r.toml:25: `model.dtype` is `{}`: must be one of `"float32"`, `"bfloat16"`',
    ]


def test_date_is_not_text(write: Write) -> None:
    lines, _ = said(write(SMALLEST.replace('"small"', "2024-01-01")))
    assert lines == ["r.toml:1: `name` is `2024-01-01`: must be text, in quotes (with --set: 'key=\"text\"')"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a = 1\nb = "x\n', 'r.toml:2: not valid TOML: a string without its closing quote in `b = "x`'),
        ("a = 1\nb = [1,\n", "r.toml:2: not valid TOML: invalid value in `b = [1,`"),
        ("a = 1\na = 2\n", "r.toml:2: not valid TOML: a second value for the same key in `a = 2`"),
        ("[a]\n[b]\n[a]\n", "r.toml:3: not valid TOML: cannot declare [a] twice in `[a]` (first at line 1)"),
        ("[a.b]\n[a.b]\n", "r.toml:2: not valid TOML: cannot declare [a.b] twice in `[a.b]` (first at line 1)"),
        ("steps 3\n", "r.toml:1: not valid TOML: no `=` after the key in `steps 3`"),
        (
            "\ufeff\ufeffa = 1\n",
            "r.toml:1: not valid TOML: invalid statement in `\\ufeffa = 1`; "
            "`\\ufeff` is a byte order mark: delete it",
        ),
        (
            "a = \u201cx\u201d\n",
            'r.toml:1: not valid TOML: invalid value in `a = \u201cx\u201d`; `\u201c` is not a TOML quote: write `"`',
        ),
    ],
)
def test_syntax_error_names_its_line(write: Write, text: str, line: str) -> None:
    number = line.split(":")[1]
    assert said(write(text)) == ([line], f"${{EDITOR:-vi}} +{number} r.toml")


def test_byte_order_mark_is_accepted(write: Write) -> None:
    """Editors on Windows add a byte order mark."""
    assert load([write("\ufeff" + SMALLEST)], (), {}).origins["name"] == "r.toml:1"


@pytest.mark.parametrize("name", ["verl/gemma", "verl/gemma.toml", "recipes/verl/gemma.toml"])
def test_missing_shipped_recipe_hints_at_copy_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said(Path(name)) == ([f"{name}: no such recipe"], "ppoctl recipes copy verl/gemma my-recipes")


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_setting_without_its_option_is_explained(prefix: str) -> None:
    word = f"{prefix}actor.optimizer.lr=1e-5"
    assert said(Path(word)) == (
        [f"`{word}` is no recipe; a setting is written with `--set`"],
        "--set actor.optimizer.lr=1e-5",
    )


def test_every_unreadable_file_is_reported(write: Write, tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"\n')
    (tmp_path / "folder.toml").mkdir()
    write(SMALLEST)
    lines, hint = said(*map(Path, ("r.toml", "none.toml", "folder.toml", "latin.toml")))
    assert lines == [
        "none.toml: no such recipe",
        "folder.toml: is not a regular file; a recipe is a `.toml` file",
        "latin.toml: is not UTF-8 text (byte 8)",
    ]
    assert hint == "ppoctl recipes list"


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_wrong_encoding_hints_at_iconv_command(write: Write, encoding: str) -> None:
    file = write(SMALLEST)
    file.write_bytes(SMALLEST.replace("small", "sm\xe4ll").encode(encoding))
    assert said(file)[1] == f"iconv -f {encoding} -t utf-8 r.toml > r.utf8.toml"


def test_list_of_tables_is_shown_only_for_misplaced_keys(smallest: Path) -> None:
    (line,), _ = said(smallest, sets=("health.reward.min=1",))
    assert line.startswith("--set: unknown key `health.reward`; [health] has `kl`, ")
    (line,), _ = said(smallest, sets=("ppo.reward.kind=gsm8k",))
    assert line == "--set: unknown key `ppo.reward`; [reward] is a table at the top of a recipe"


def test_missing_path_variable_is_named(write: Write) -> None:
    with pytest.raises(MissingAssetError) as caught:
        load([write(SMALLEST.replace('"train.jsonl"', '"$PPOCTL_DATA/a.jsonl"'))], (), {})
    lines, hint = caught.value.message.splitlines(), caught.value.hint
    assert lines == [
        "r.toml:7: `data.train.path` is `$PPOCTL_DATA/a.jsonl`, but `PPOCTL_DATA` is not set in the environment"
    ]
    assert hint == "export PPOCTL_DATA=VALUE"


def test_broken_array_in_variable_is_named(smallest: Path) -> None:
    environ = {"PPOCTL_ROLLOUT__STOP_STRINGS": "[x", "PPOCTL_STEPS": "7"}
    lines, _ = said(smallest, environ=environ)
    assert lines == ['environment PPOCTL_ROLLOUT__STOP_STRINGS: `rollout.stop_strings` is `"[x"`: must be an array']


def test_missing_recipe_argument_is_an_error() -> None:
    assert said() == (["no recipe given"], "ppoctl recipes list")


def test_long_value_is_truncated_in_error(smallest: Path) -> None:
    lines, _ = said(smallest, sets=("steps=" + "x" * 200,))
    assert lines == ["--set: `steps` is `" + '"' + "x" * 76 + "...`: must be a whole number"]


def test_unknown_ppoctl_variable_gets_suggestion(write: Write) -> None:
    environ = {"PPOCTL_ACTOR_OPTIMIZER_LR": "1", "PPOCTL_STEPZ": "3", "PPOCTL_ROLLOUT": "x", "PPOCTL_DATA": "/data"}
    lines, hint = said(write(SMALLEST), environ=environ)
    assert sorted(lines) == [
        "environment PPOCTL_ACTOR_OPTIMIZER_LR: unknown key `actor_optimizer_lr`; did you mean `actor.optimizer.lr`?",
        'environment PPOCTL_ROLLOUT: `rollout` is `"x"`: must be a table',
        "environment PPOCTL_STEPZ: unknown key `stepz`; did you mean `steps`?",
    ]
    assert hint == "ppoctl recipes keys rollout"


def test_every_ppoctl_variable_sets_a_key_or_is_listed() -> None:
    """Every variable with ppoctl's prefix in this source tree sets a key, or is listed. Some are wrong on purpose."""
    wrong = {"PPOCTL_", "PPOCTL_ACTR__LR", "PPOCTL_ACTOR_OPTIMIZER_LR", "PPOCTL_STEPZ", "PPOCTL_ROLLOUT"}
    files = [
        path
        for folder in ("src", "tests", "docs", "recipes", "benchmarks", "slurm")
        for path in (ROOT / folder).rglob("*")
    ]
    texts = [
        path.read_text("utf-8", errors="replace")
        for path in (*files, ROOT / "README.md")
        if path.suffix in (".py", ".md", ".toml", ".sh")
    ]
    named = {name for text in texts for name in re.findall(r"\bPPOCTL_[A-Z_]*", text)} - wrong - {"PPOCTL_MODELS"}
    paths = {name: tuple(name.removeprefix(PREFIX).lower().split(NESTED)) for name in named - set(NO_KEYS)}
    assert [name for name, path in paths.items() if not tree.keys_at(ROOT_TABLE, path)] == []


def test_hint_suggests_nearest_divisible_size(smallest: Path) -> None:
    assert "`--set ppo.minibatch_seqs=32`" in str(
        said(smallest, sets=("rollout.prompts_per_step=64", "ppo.minibatch_seqs=30"))[1]
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = " + "[" * 100_000, "not valid TOML: arrays or tables are nested too deep"),
        (
            "x = " + "9" * 5_000,
            "not valid TOML: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
        ("#" * (1 << 20) + "\n", "has 1048577 bytes; a recipe has at most 1048576"),
    ],
    ids=["deep", "long", "large"],
)
def test_unparsable_file_error_names_cause(write: Write, text: str, says: str) -> None:
    lines, _ = said(write(text))
    assert [line.partition(": ")[2] for line in lines] == [says]


def test_device_file_is_not_a_recipe() -> None:
    lines, _ = said(Path("/dev/zero"))
    assert lines == ["/dev/zero: is not a regular file; a recipe is a `.toml` file"]


@pytest.mark.parametrize("wrong", ["steps=1000000000000", f"name={'x' * 101}"])
def test_impossible_value_is_rejected(smallest: Path, wrong: str) -> None:
    lines, _ = said(smallest, sets=(wrong,))
    assert len(lines) == 1
    assert lines[0].startswith(f"--set: `{wrong.partition('=')[0]}` is")


@pytest.mark.parametrize(
    ("kind", "key", "value", "says"),
    [
        ("python", "function", "rw.py", "does not name a function; write `rw.py:score`"),
        ("python", "function", "my.module:a-b", "does not name a function; write `my.module:score`"),
        ("http", "url", "scores.example:80", "must begin with `http://` or `https://` and the name of a host"),
        ("http", "url", "http://s.org:p", "cannot be read as a URL: Port could not be cast to integer value as 'p'"),
        ("http", "url", "http://[x/score", "cannot be read as a URL: Invalid IPv6 URL"),
    ],
)
def test_invalid_function_or_url_of_reward_error_names_reason(kind: str, key: str, value: str, says: str) -> None:
    lines, _ = said(ROOT / "recipes" / "quickstart.toml", sets=(f"reward={{kind='{kind}', {key}='{value}'}}",))
    assert lines == [f'--set: `reward.{key}` is `"{value}"`: {says}']
