"""The screens of `validate --loss`, word for word."""

import json
import shutil
from pathlib import Path

import pytest

from cli.conftest import CliResult, RunCli
from own_loss_page import written
from recipe.conftest import SMALLEST

FAULTY = """
def loss(batch):
    return -(batch.advantages - batch.advantages[batch.mask].mean()) * batch.logprobs
"""
NOTE = "note: r.toml:4: `model.path` is `org/base`: it has not been fetched; not checked\n"
HINT = "\nhint: ppoctl recipes keys ppo.policy_loss.function\n"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: RunCli) -> RunCli:
    """Return a function that runs a command in a folder with a recipe `r.toml` and the files of the page."""
    monkeypatch.chdir(tmp_path)
    without_critic = SMALLEST.partition("[critic.optimizer]")[0]
    Path("r.toml").write_text(SMALLEST.replace('"base"', '"org/base"'), "utf-8")
    Path("no-critic.toml").write_text(without_critic.replace('"base"', '"org/base"'), "utf-8")
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n' * 4, "utf-8")
    for name in ("my_loss.py", "my_estimator.py", "loss.toml", "estimator.toml"):
        written(tmp_path, name)
    return ask


def test_trial_prints_each_check_of_loss_and_estimator(ask: RunCli, tmp_path: Path) -> None:
    result = ask("validate", "no-critic.toml", "loss.toml", "estimator.toml", "--loss")
    assert result.code == 0
    screen = f"""\
ppo.policy_loss ({tmp_path}/my_loss.py:loss): 8 random responses of at most 12 tokens
ok  losses are finite numbers of shape [8, 12]; metric `policy/custom_weight`
ok  gradients are finite
ok  the log-probs have a gradient
ok  a second call returns the same
ok  the gradient is the same in 1, 2 and 4 microbatches
ok  masked-out tokens have no gradient
ok  masked-out numbers change no gradient
ok  padding changes no gradient
ok  a first update moves the log-probs of 100% of the tokens in the direction of their advantage

ppo.advantages ({tmp_path}/my_estimator.py:estimate): 1 random responses to each of 4 prompts
ok  advantages are finite numbers of shape [4, 12]; metric `advantage/custom_baseline`
ok  a second call returns the same
ok  padding changes no advantage
ok  the order of the responses changes no advantage

"""
    assert result.out == screen
    assert result.err.endswith("ok: no-critic.toml + loss.toml + estimator.toml\n")


def test_fault_is_an_error_as_text_and_json(ask: RunCli, tmp_path: Path) -> None:
    Path("my_loss.py").write_text(FAULTY, "utf-8")
    Path("loss.toml").write_text('ppo.policy_loss = { kind = "python", function = "my_loss.py:loss" }', "utf-8")
    says = "the gradient differs in 2 and 4 microbatches: the loss of a row depends on other rows"
    result = ask("validate", "r.toml", "loss.toml", "--loss")
    assert f"\nerror  {says}\n" in result.out
    error = f"error: `ppo.policy_loss` (`{tmp_path}/my_loss.py:loss`): {says}\n"
    assert (result.code, result.err) == (2, f"{NOTE}{error}{HINT}")
    answer = json.loads(ask("validate", "r.toml", "loss.toml", "--loss", "--json").out)
    assert (answer["ok"], answer["loss"][0]["key"]) == (False, "ppo.policy_loss")
    found = {"level": "error", "kind": "loss", "where": "", "what": says, "hint": None}
    assert found in answer["loss"][0]["findings"]


def test_built_in_loss_is_tried_under_its_kind(ask: RunCli) -> None:
    result = ask("validate", "r.toml", "--loss")
    assert result.out.startswith("ppo.policy_loss (clip): 8 random responses of at most 12 tokens\nok  losses")
    assert result.out.count("\nok") == 9
    assert ask("validate", "r.toml") == CliResult(0, "", f"{NOTE}ok: r.toml\n")


def test_only_the_trial_imports_the_file_of_a_loss(ask: RunCli, tmp_path: Path) -> None:
    Path("my_loss.py").write_text('raise SystemError("imported")', "utf-8")
    for command in (("validate",), ("plan",), ("validate", "--show"), ("preview", "--rows", "1")):
        result = ask(command[0], "r.toml", "loss.toml", *command[1:])
        assert "imported" not in result.out + result.err, command
    result = ask("validate", "r.toml", "loss.toml", "--loss")
    assert result.code == 2
    says = (
        'it cannot be imported: SystemError: imported (my_loss.py:1, in `<module>`: `raise SystemError("imported")`)'
    )
    assert f"`ppo.policy_loss.function` is `{tmp_path}/my_loss.py:loss`: {says}" in result.err


def test_missing_or_changed_file_is_an_error_of_every_command(ask: RunCli, tmp_path: Path) -> None:
    shutil.copy("my_loss.py", "kept.py")
    Path("my_loss.py").unlink()
    for command in ("validate", "plan"):
        result = ask(command, "r.toml", "loss.toml")
        missing = f"the `ppo.policy_loss` function is `{tmp_path}/my_loss.py:loss`, but the file"
        assert missing in result.err, command
    changed = ("--set", f"ppo.policy_loss.digest={'0' * 64}", "--set", "ppo.policy_loss.function=kept.py:loss")
    result = ask("validate", "r.toml", "loss.toml", *changed)
    assert result.code == 2
    assert "the `ppo.policy_loss` function has changed: " in result.err
