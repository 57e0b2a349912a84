"""Command line basics: help in complete sentences with examples that can be typed, completion, and errors that need
no heavy import."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer
from typer.core import TyperGroup

from cli.conftest import CliResult, RunCli
from ppoctl.cli import evaluate
from ppoctl.cli.app import app, run
from ppoctl.cli.help import EXAMPLES, SECTIONS, one_line
from ppoctl.core.errors import RewardError
from recipe.conftest import SMALLEST


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: RunCli) -> RunCli:
    monkeypatch.chdir(tmp_path)
    return ask


def commands(group: Any, name: str = "") -> dict[str, Any]:
    """Return every command by its words after `ppoctl`."""
    context = group.make_context(name or "ppoctl", [], resilient_parsing=True)
    found = {f"{name} {each}".strip(): group.get_command(context, each) for each in group.list_commands(context)}
    inner = [commands(each, word) for word, each in found.items() if isinstance(each, TyperGroup)]
    return {word: each for part in (found, *inner) for word, each in part.items()}


COMMANDS = commands(typer.main.get_command(app))


def test_examples_exist_for_exactly_the_commands() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_example_is_a_valid_command_line(ask: RunCli, name: str) -> None:
    for line in EXAMPLES[name].strip().splitlines():
        words = shlex.split(line.strip().partition(" >")[0], comments=True)
        assert len(f"    {line.strip()}") <= 80
        assert words[: 1 + len(name.split())] == ["ppoctl", *name.split()]
        command = COMMANDS[name]
        if not isinstance(command, TyperGroup):
            command.make_context(name, words[1 + len(name.split()) :])


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_help_list_truncates_no_sentence(ask: RunCli, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (["--help"], ["recipes", "--help"]):
        out = ask(*words).out
        assert out.isascii()
        assert "..." not in out.partition("COMMAND [ARGS]...")[2]
        assert max(map(len, out.splitlines())) <= int(columns)
    text = " ".join(ask("--help").out.split())
    assert (
        "resume Resume a run from the point where it stopped. stop Stop a run gracefully, here or in a job. rollout "
        in text
    )


def test_sections_of_the_help_have_every_command_once() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(name for name in COMMANDS if " " not in name)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_help_has_no_type_names_or_braces(ask: RunCli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = ask(*name.split(), "--help").out
    assert re.findall(r"<[^|>]*>|x>=|[{}]|\[\[", out.replace("TABLE={...}", "")) == []
    assert max(map(len, out.splitlines())) <= 80
    for option in COMMANDS[name].params:
        if option.param_type_name == "option" and not option.is_flag:
            choices = choices_of(option.type_descriptor.annotation)
            assert option.metavar or choices, option.name
            unsaid = [choice for choice in choices if choice not in re.split(r"\W+", option.help)]
            assert not (option.metavar and unsaid), option.name


def choices_of(annotation: Any) -> list[str]:
    """Return the words that an option accepts, if these are few."""
    inner = [] if isinstance(annotation, str) else get_args(annotation)
    return [word for each in inner for word in ([each] if isinstance(each, str) else choices_of(each))]


def test_logs_help_shows_usage_options_and_examples(ask: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    screen = """\
Usage: ppoctl logs [OPTIONS] RUN

  Print the logs of a run. Default: the console of the run. --what selects the
  engines, every rank, or Slurm. --json prints the list of files.

Arguments:
  RUN  Run directory, or the name of a run in runs/.  [required]

Options:
  -f, --follow       Follow the log until the run ends, or until Ctrl-C.
  --attempt N        Print the logs of this attempt. Default: the newest.
  --what KIND        console, engines, ranks, slurm, all, or a file name.
                     [default: console]
  -n, --lines COUNT  Start with the last COUNT lines.
  --list             List the log files with their sizes.
  --json             Print one JSON object, also for an error.
  --runs FOLDER      Folder in which RUN is looked up.  [default: runs]
  -h, --help         Show this message and exit.

  Examples:
    ppoctl logs my -f                # follow the console until the run ends
    ppoctl logs my --what engines -n 20
"""
    assert ask("logs", "--help").out == screen
    assert ask("recipes", "keys", "--help").out.startswith("Usage: ppoctl recipes keys [OPTIONS] [KEY]\n")
    assert "--rows N         Training rows for --reward.  [default: 64]\n" in ask("validate", "--help").out


def test_help_command_equals_the_help_option(ask: RunCli) -> None:
    assert ask("help", "plan") == ask("plan", "--help")
    assert ask("help") == ask("--help")
    assert ask("help", "recipes", "keys") == ask("recipes", "keys", "--help")
    assert ask("help", "plam").err.startswith("error: no such command `plam`; did you mean `plan`?\n")


def test_version_has_three_spellings(ask: RunCli) -> None:
    assert ask("version") == ask("-V") == ask("--version")
    assert ask("-V").code == 0
    assert ask("-V").out.startswith("ppoctl ")


def test_missing_choice_is_reported_in_one_line(ask: RunCli) -> None:
    assert ask("convert-ckpt", "a", "b") == CliResult(
        2, "", "error: missing option `--to`: one of hf, megatron, peft\n\nhint: ppoctl convert-ckpt --help\n"
    )
    assert one_line("Missing argument 'RECIPE'.") == "Missing argument 'RECIPE'."


COMPLETED = [
    ("ppoctl status ", ["q1", "sweep/a"]),
    ("ppoctl rm q1 s", ["sweep/a"]),
    ("ppoctl logs runs/q", ["runs/q1"]),
    ("ppoctl compare q1 q", ["q1"]),
    ("ppoctl eval s", ["sweep/a"]),
    ("ppoctl recipes copy quick", ["quickstart", "quickstart-grpo"]),
    ("ppoctl recipes keys ppo.kl.co", ["ppo.kl.coef"]),
    ("ppoctl plan r.toml --set ppo.kl.co", ["ppo.kl.coef="]),
]


@pytest.mark.parametrize(("line", "offered"), COMPLETED, ids=[line for line, _ in COMPLETED])
def test_shell_completes_runs_recipes_and_keys(
    ask: RunCli,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    offered: list[str],
) -> None:
    for name in ("q1", "sweep/a"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "run.json").touch()
    monkeypatch.setenv("_PPOCTL_COMPLETE", "complete_bash")  # as bash calls it
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit):
        run([])
    assert capsys.readouterr().out.split() == offered


def test_eval_requires_exactly_one_target(ask: RunCli) -> None:
    assert ask("eval").err == (
        "error: the checkpoint to evaluate is missing: a run, one of its states/actor/N folders, "
        "or a model folder (with RECIPE)\n\nhint: ppoctl eval --help\n"
    )
    for words in (["eval", "a", "b"], ["eval", "a", "--ckpt", "b"], ["eval", "r.toml", "a", "--ckpt", "b"]):
        result = ask(*words)
        assert result == CliResult(
            2, "", "error: `ppoctl eval` evaluates one checkpoint, not `a`, `b`\n\nhint: ppoctl eval a\n"
        )
    Path("m").mkdir()
    Path("m/config.json").touch()
    says = "error: `m` is a model folder: add a recipe that names the evaluation sets\n"
    for words in (["eval", "m"], ["eval", "--ckpt", "m"]):
        assert ask(*words) == CliResult(2, "", f"{says}\nhint: ppoctl eval m recipes/quickstart.toml\n")
    assert ask("eval", "gone").err == (
        "error: `gone` is neither a run, a saved actor state nor a model folder\n\nhint: ppoctl runs\n"
    )
    accept = RewardError("changed", hint="`ppoctl resume RUN --set a=b`")
    with pytest.raises(RewardError) as caught, evaluate._named("ppoctl eval runs/a"):
        raise accept
    assert caught.value.hint == "`ppoctl eval runs/a --set a=b`"
    assert evaluate._arguments([Path("r.toml"), Path("m")], None) == (Path("m"), [Path("r.toml")])
    assert evaluate._arguments([Path("r.toml")], Path("m")) == (Path("m"), [Path("r.toml")])


def test_unwritable_folder_is_refused_before_anything_is_read(ask: RunCli) -> None:
    Path("m").mkdir()
    Path("m/config.json").touch()
    Path("file").touch()
    Path("r.toml").write_text(SMALLEST, "utf-8")  # whose rows and model are not on this machine
    says = f"error: `{Path.cwd()}/file` is a file, but `file/x` must be a folder"
    for command in ("train", "rollout"):
        for on in ("here", "slurm"):
            assert ask(command, "r.toml", "--runs", "file/x", "--on", on).err.splitlines()[0] == says
    assert ask("eval", "m", "r.toml", "--out", "no/out.jsonl").err.startswith("error: `no` is not a folder\n")
    assert ask("convert-ckpt", "m", "file", "--to", "hf").err.startswith("error: `file` exists\n")


def test_eval_prints_metrics_even_if_samples_cannot_be_written(
    ask: RunCli, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(stamp="actor@3", metrics=lambda: {"eval/held/pass_at_1": 0.5}, rows=[{"set": "held"}])
    Path("out").mkdir()
    with pytest.raises(Exception, match="cannot write `out`: Is a directory"):
        evaluate._print_result(Path("q1"), found, Path("out"), as_json=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "metric               value\neval/held/pass_at_1  0.5\n\nstate: actor@3\n"
    evaluate._print_result(Path("q1"), found, Path("rows.jsonl"), as_json=True)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["figures"] == {"eval/held/pass_at_1": 0.5}
    assert json.loads(Path("rows.jsonl").read_text("ascii")) == {"set": "held"}
