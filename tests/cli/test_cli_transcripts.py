"""The command line word for word: command, exit code, stdout and stderr."""

import json
import shutil
from pathlib import Path

import pytest

from cli.conftest import CliResult, RunCli
from recipe.conftest import SMALLEST

MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: RunCli) -> RunCli:
    """Return a function such that `ask("plan", "r.toml")` runs in a folder with a recipe `r.toml`, its data and no
    model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPOCTL_DATA", raising=False)
    Path("r.toml").write_text(SMALLEST.replace('"base"', '"org/base"'), "utf-8")
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 4, "utf-8")
    return ask


def test_validate_notes_doubtful_settings_as_text_and_json(ask: RunCli) -> None:
    doubtful = ("--set", "ppo.policy_loss.kind=reinforce")
    note, missing = json.loads(ask("validate", "r.toml", *doubtful, "--json").out)["findings"]
    assert note == {
        "level": "note",
        "kind": "recipe",
        "where": "--set",
        "what": "the loss has no ratio to the policy that generated the responses, and the actor makes 2 updates per "
        'step: all but the first are off-policy: `ppo.policy_loss.kind` = `"reinforce"` (--set), `ppo.epochs` = `1` '
        "(default), `ppo.minibatch_seqs` = `2` (r.toml:15)",
        "hint": "change the recipe, or add `--set ppo.epochs=1 --set ppo.minibatch_seqs=4`",
    }
    assert ask("validate", "r.toml", *doubtful).err.splitlines() == [
        f"note: --set: {note['what']}; fix: {note['hint']}",
        f"note: r.toml:4: {missing['what']}",
        "ok: r.toml",
    ]


def test_validate_show_prints_every_value_with_its_origin(ask: RunCli) -> None:
    result = ask("validate", "r.toml", "--set", "seed=7", "--show")
    lines = result.out.splitlines()
    assert lines[0].split() == ["key", "value", "set", "by", "changes"]
    assert lines[1].split() == ["name", '"small"', "r.toml:1", "reporting"]
    assert lines[2].split() == ["seed", "7", "--set", "results"]
    assert ["ppo.advantages.gamma", "1.0", "default", "results"] in [line.split() for line in lines]


def test_validate_reports_all_problems_and_missing_files_at_once(ask: RunCli) -> None:
    Path("train.jsonl").unlink()
    wrong = ("--set", "sed=7", "--set", "ppo.minibatch_seqs=3", "--set", "model.path=./no")
    result = ask("validate", "r.toml", *wrong, "--assets")
    here = Path.cwd()
    assert result == CliResult(
        2,
        "",
        f"""\
error: --set: unknown key `sed`; did you mean `seed`?
error: --set: the 4 sequences of a step do not divide into minibatches of 3: `ppo.minibatch_seqs` = `3` (--set), \
`rollout.prompts_per_step` = `4` (r.toml:9), `rollout.samples_per_prompt` = `1` (default)
error: --set: `model.path` is `{here}/no`: no such folder
error: r.toml:7: `data.train.path` is `{here}/train.jsonl`: no such file

hint: ppoctl recipes keys
""",
    )


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_model_folder_must_be_complete(ask: RunCli, missing: str) -> None:
    shutil.copytree(MODEL, "m")
    for file in Path("m").glob("tokenizer*" if missing == "tokenizer.json" else missing):
        file.unlink()
    result = ask("validate", "r.toml", "--set", "model.path=m", "--assets")
    assert result.code == 3
    lacks = {
        "config.json": "the folder has no config.json",
        "tokenizer.json": "the folder has no tokenizer",
        "model.safetensors": "the folder has neither model.safetensors nor its index",
    }[missing]
    assert f"error: --set: `model.path` is `{Path('m').absolute()}`: {lacks}\n" in result.err
    result = ask("validate", "r.toml", "--set", "model.path=m")
    assert result.code == 0
    assert f": {lacks}; not checked\n" in result.err


def test_dataset_must_be_a_nonempty_file(ask: RunCli) -> None:
    Path("folder.jsonl").mkdir()
    Path("empty.jsonl").touch()
    Path("rows.csv").write_text("a,b\n", "utf-8")
    sets = [f"data.eval.{name}={{format='gsm8k', path='{name}.jsonl'}}" for name in ("folder", "empty")]
    result = ask("validate", "r.toml", "--set", sets[0], "--set", sets[1], "--set", "data.train.path=rows.csv")
    here = Path.cwd()
    assert result.code == 2
    assert result.err.splitlines()[1:4] == [
        f"error: --set: `data.train.path` is `{here}/rows.csv`: must end in `.jsonl`, `.jsonl.gz` or `.parquet`",
        f"error: --set: `data.eval.folder.path` is `{here}/folder.jsonl`: a folder without `.jsonl` or `.parquet`",
        f"error: --set: [data.eval.empty] has no rows: `{here}/empty.jsonl` is empty",
    ]


def test_plan_prints_batch_sizes_and_creates_no_file(ask: RunCli) -> None:
    before = sorted(Path().rglob("*"))
    result = ask("plan", "r.toml", "--set", "data.eval.e={format='gsm8k', path='train.jsonl'}")
    assert result == CliResult(
        0,
        """\
small: 10 PPO steps of 4 sequences
  memory       unknown: the model's config.json is not on this machine
  GPUs         not required: all roles run in one process, vLLM in a second
  disk         4.86 KiB for records of steps; checkpoints unknown: the model is not a local folder of a known family
  updates      actor 20 (2 per step), critic 20 (2 per step)
  checkpoints  10, of which 2 are kept; 2 evaluations
  not checked  memory; speed (known after a step)
  `--full` prints the rest: batch sizes, algorithm, processes, schedules, data, memory by stage
""",
        "note: r.toml:4: `model.path` is `org/base`: it has not been fetched; not checked\n",
    )
    assert sorted(Path().rglob("*")) == before


USAGE = [
    (["plna"], "no such command `plna`; did you mean `plan`?", "ppoctl --help"),
    (["plan"], "missing argument `RECIPE`", "ppoctl plan --help"),
    (["plan", "r.toml", "--sett", "x"], "no such option `--sett`; did you mean `--set`?", "ppoctl plan --help"),
    (["plan", "r.toml", "--set"], "option `--set` requires an argument", "ppoctl plan --help"),
    (["plan", "r.toml", "--gpu-gib", "0"], "invalid value for `--gpu-gib`: `0` is less than 1", "ppoctl plan --help"),
    (["plan", "--gpu-gib", "H100"], "invalid value for `--gpu-gib`: `H100` is not a number", "ppoctl plan --help"),
    (["show", "x", "--step", "1.5"], "invalid value for `--step`: `1.5` is not a whole number", "ppoctl show --help"),
    (["recipes", "cpy"], "no such command `cpy`; did you mean `copy`?", "ppoctl recipes --help"),
    (["validate", "none.toml"], "none.toml: no such recipe", "ppoctl recipes list"),
    (
        ["recipes", "show", "quikstart"],
        "there is no recipe `quikstart`; did you mean `quickstart`?",
        "ppoctl recipes list",
    ),
    (
        ["recipes", "keys", "rollout.temprature"],
        "no key has `rollout.temprature` in its name; did you mean `rollout.temperature`?",
        "ppoctl recipes keys",
    ),
]


@pytest.mark.parametrize(("words", "message", "hint"), USAGE, ids=[" ".join(words) for words, _, _ in USAGE])
def test_wrong_command_line_is_an_error_as_text_and_json(
    ask: RunCli, words: list[str], message: str, hint: str
) -> None:
    assert ask(*words) == CliResult(2, "", f"error: {message}\n\nhint: {hint}\n")
    if words[-1] == "--set":  # --json would be its value
        return
    result = ask(*words, "--json")
    assert result.code == 2
    assert result.err == ""
    error = json.loads(result.out)["error"]
    assert (error["message"], error["problems"], error["hint"], error["exit_code"]) == (message, [message], hint, 2)


def test_validate_tries_the_reward_on_training_rows(ask: RunCli) -> None:
    result = ask("validate", "r.toml", "--set", f"model.path={MODEL}", "--reward", "--rows", "2")
    lines = result.out.splitlines()
    assert (result.code, lines[0]) == (0, "reward (gsm8k): 2 rows, 43 responses")
    assert lines[1].split() == ["response", "score", "as", "gold", "no", "score", "slowest"]
    assert [line.split()[:3] for line in lines[2:6]] == [
        ["gold", "1.000", "100%"], ["wrong", "0.000", "0%"], ["empty", "0.000", "0%"], ["cut", "0.000", "0%"],
    ]  # fmt: skip
    assert "ok    gold beats wrong, empty and cut answers on all 2 rows" in lines
    assert lines[-2].startswith("scoring time per response: p50 ")
    assert result.err.endswith("ok: r.toml\n")


def test_validate_refuses_a_reward_that_does_not_prefer_gold(ask: RunCli) -> None:
    words = ("validate", "r.toml", "--set", f"model.path={MODEL}", "--set", "reward.last_chars=1", "--reward")
    result = ask(*words)
    assert result.code == 4
    assert "\nerror  gold does not win on 100.0% of 4 rows; first `" in result.out
    assert "error: reward (gsm8k): gold does not win on 100.0% of 4 rows; first " in result.err
    answer = json.loads(ask(*words, "--json").out)
    assert (answer["error"]["exit_code"], answer["ok"]) == (4, False)
    (report,) = answer["reward"]
    assert report["responses"][0] == {**report["responses"][0], "response": "gold", "rows": 4, "mean": 0.0}
    assert {found["level"] for found in report["findings"]} == {"error"}


def test_json_answers_are_single_objects(ask: RunCli) -> None:
    answer = json.loads(ask("validate", "r.toml", "--show", "--json").out)
    assert answer["ok"] is True
    assert answer["origins"]["steps"] == "r.toml:2"
    assert answer["recipe"]["steps"] == 10
    assert json.loads(ask("plan", "r.toml", "--json").out)["batch"]["sequences_per_step"] == 4
    names = [recipe["name"] for recipe in json.loads(ask("recipes", "list", "--json").out)["recipes"]]
    assert {"quickstart", "gsm8k-smoke", "dsr1-7b"} <= set(names)
    keys = json.loads(ask("recipes", "keys", "ppo.kl", "--json").out)["keys"]
    assert {key["key"] for key in keys} >= {"ppo.kl.place", "ppo.kl.estimator", "ppo.kl.coef"}
    assert all(key["key"].startswith("ppo.kl.") for key in keys)
    assert json.loads(ask("recipes", "metrics", "--json").out)["metrics"][0]["name"] == "rollout/response_tokens_mean"
    assert "steps" in json.loads(ask("recipes", "show", "quickstart", "--json").out)["text"]


def test_algorithm_part_is_described_below_its_keys(ask: RunCli) -> None:
    lines = ask("recipes", "keys", "ppo.value_loss").out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["key", "ppo.value_loss.clip", "ppo.value_loss.scale"]
    below = lines.index("ppo.value_loss")
    assert lines[below - 1] == ""
    assert lines[below + 1].strip() in ask("recipes", "algorithms").out.splitlines()
    assert "\nppo.value_loss\n" not in ask("recipes", "keys", "ppo").out  # a complete table has too much text
    parts = json.loads(ask("recipes", "keys", "ppo.value_loss.clip", "--json").out)["parts"]
    assert [part["names"] for part in parts] == [["ppo.value_loss"]]


def test_metrics_are_looked_up_by_name_or_group(ask: RunCli) -> None:
    lines = ask("recipes", "metrics", "kl").out.splitlines()
    assert lines[0].split()[0] == "metric"
    assert {line.split()[0] for line in lines[1:]} >= {"kl/reference_mean", "kl/coef", "kl/penalty_mean"}
    # The last column has the console's name. The metrics of a group have too much text.
    assert [line.split()[0] for line in lines[1:] if not line.startswith("kl/")] == ["policy/approx_kl"]
    assert ask("recipes", "metrics", "ev").out.splitlines()[0] == "value/explained_variance"
    out = ask("recipes", "metrics", "policy/clip_frac_high").out
    assert '\nppo.policy_loss.kind = "clip"\n  PPO\'s clipped surrogate: ' in out
    assert "\n  clip_high: source: DAPO (arXiv:2503.14476), which uses 0.28; default of: " in out
    assert 'kind = "reinforce"' not in out
    assert ask("recipes", "metrics", "eval/any/pass_at_1").out.splitlines()[0] == "eval/{set}/pass_at_1"
    result = ask("recipes", "metrics", "policy/clip_fraction")
    assert result == CliResult(
        2,
        "",
        "error: no metric is called `policy/clip_fraction`; did you mean `policy/clip_frac`?\n\n"
        "hint: ppoctl recipes metrics\n",
    )


def test_coming_from_prints_the_keys_of_another_system(ask: RunCli) -> None:
    out = ask("recipes", "coming-from", "trl").out
    assert out.startswith("## TRL\n\nVersion: 1.10 to 1.12 ")
    assert "| `cliprange_value` | `ppo.value_loss.clip` | 0.2 in TRL, off in ppoctl |\n" in out
    assert "## verl" not in out
    assert ask("recipes", "coming-from", "verll").err == (
        "error: there is no key table for `verll`; did you mean `verl`?\n\nhint: ppoctl recipes coming-from\n"
    )
    [system] = json.loads(ask("recipes", "coming-from", "verl", "--json").out)["systems"]
    assert system["rows"][0]["theirs"] == ["algorithm.adv_estimator"]
    assert ask("recipes", "keys", "clip_ratio_high").err.startswith(
        "error: no key has `clip_ratio_high` in its name; it is a key of verl; use `ppo.policy_loss.clip_high`: "
    )
    recipe = ask("recipes", "coming-from", "verl", "--defaults", "--algorithm", "grpo").out
    assert "\nppo.policy_loss.dual_clip = 3.0\n" in recipe
    assert json.loads(ask("recipes", "coming-from", "verl", "--defaults", "--json").out)["algorithm"] == "ppo"
    for system in ((), ("peft",)):
        assert ask("recipes", "coming-from", *system, "--defaults").err == (
            "error: `--defaults` requires one of the systems whose defaults are listed: `NeMo-RL`, `verl`, `TRL`\n\n"
            "hint: ppoctl recipes coming-from verl --defaults\n"
        )


def test_missing_command_prints_the_help(ask: RunCli) -> None:
    assert ask() == ask("--help") == ask("-h")
    assert ask("--help").code == 0


def test_quickstart_copy_includes_its_files_and_never_overwrites(ask: RunCli) -> None:
    result = ask("recipes", "copy", "quickstart", "mine")
    assert result == CliResult(
        0, "mine/quickstart.toml\nmine/quickstart\n", "next: ppoctl validate mine/quickstart.toml\n"
    )
    assert Path("mine/quickstart/train.jsonl").is_file()
    again = ask("recipes", "copy", "quickstart", "mine")
    assert again.code == 2
    assert again.err.startswith("error: `mine/quickstart.toml` exists and is not overwritten\n")
    Path("mine/quickstart.toml").rename("mine/x.toml")
    Path("mine/quickstart/train.jsonl").write_text("{}\n")
    assert "`mine/quickstart` exists" in ask("recipes", "copy", "quickstart", "mine").err
    assert not Path("mine/quickstart.toml").exists()


def test_recipes_that_read_the_same_folder_share_its_copy(ask: RunCli) -> None:
    assert ask("recipes", "copy", "quickstart-grpo", "mine").out == "mine/quickstart-grpo.toml\nmine/quickstart\n"
    assert ask("recipes", "copy", "gsm8k-smoke", "mine").out == "mine/gsm8k-smoke.toml\n"
    assert ask("validate", "mine/quickstart-grpo.toml").code == 0


def test_recipe_copy_reads_the_copy_of_a_folder_that_recipes_share(ask: RunCli) -> None:
    copied = "mine/quickstart-2gpu.toml\nmine/quickstart\n"
    assert ask("recipes", "copy", "own/quickstart-2gpu", "mine").out == copied
    assert 'path  = "quickstart/model"' in Path("mine/quickstart-2gpu.toml").read_text()
    assert ask("validate", "mine/quickstart-2gpu.toml").code == 0


def test_recipe_copy_can_have_another_name(ask: RunCli) -> None:
    assert ask("recipes", "copy", "dsr1-7b", "own.toml") == CliResult(
        0, "own.toml\n", "next: ppoctl validate own.toml\n"
    )


def test_recipes_list_shows_the_first_comment_line(ask: RunCli) -> None:
    lines = ask("recipes", "list").out.splitlines()
    assert all(len(line.split(maxsplit=1)) == 2 and len(line) <= 140 for line in lines)
