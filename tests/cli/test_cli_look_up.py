"""Commands that explain a recipe: keys by word, one metric, the reference pages, on any terminal."""

import json
import sys
from collections.abc import Callable

import pytest

from cli.conftest import RunCli
from conventions.conftest import ROOT

LookUp = Callable[..., str]


@pytest.fixture
def ask(ask: RunCli) -> LookUp:
    """Return a function such that `ask("keys", "lr")` returns the output of `ppoctl recipes keys lr`."""
    return lambda *words: ask("recipes", *words).out


def test_metric_lookup_explains_reading_and_actions(ask: LookUp) -> None:
    assert ask("metrics", "reward/seconds_max").startswith(
        "reward/seconds_max\n"
        "  time of a scorer for the slowest sample (s)\n"
        "  healthy: below the time of the rollout\n"
        "  Scoring overlaps generation, so it costs time only if it is slower than generation.\n"
        "  - `time/reward_s` is a large part of the step: raise `reward.workers` (or "
        "`reward.concurrent` of a service)\n"
    )
    [one] = json.loads(ask("metrics", "policy/clip_frac", "--json"))["metrics"]
    assert list(one) == ["name", "unit", "says", "healthy", "read", "when"]
    assert one["when"]["above 0.3"].endswith("lower `actor.optimizer.lr` or `ppo.epochs`")


@pytest.mark.parametrize(("words", "page"), [("keys", "recipe.md"), ("metrics", "metrics.md")])
def test_page_option_prints_the_page_as_text_or_json(ask: LookUp, words: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    assert ask(words, "--page") == text
    assert json.loads(ask(words, "--page", "--json")) == {"page": text}


def test_keys_lookup_finds_every_key_containing_the_word(ask: LookUp) -> None:
    found = [line.split()[0] for line in ask("keys", "grad_clip").splitlines()[1:]]
    assert found == ["actor.optimizer.grad_clip", "critic.optimizer.grad_clip"]
    assert ask("keys", "lr").splitlines()[1].split()[0] == "actor.optimizer.lr"
    # A table is shown if one has that name.
    assert {line.split(".")[0] for line in ask("keys", "eval").splitlines()[1:]} == {"eval"}


@pytest.mark.parametrize(
    "columns", [60, pytest.param(80, marks=pytest.mark.ci("60")), 120, pytest.param(400, marks=pytest.mark.ci("120"))]
)
def test_lookup_output_fits_the_terminal(ask: LookUp, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """On a terminal too narrow for its table a key is a block; lines break between words."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    for words in (("keys", "kl"), ("keys", "ppo.policy_loss"), ("metrics", "value"), ("metrics", "policy/clip_frac")):
        lines = ask(*words).splitlines()
        assert [line for line in lines if len(line) > columns] == []
    lines = ask("keys", "ppo.epochs").splitlines()
    if columns == 60:
        assert lines[:4] == [
            "ppo.epochs",
            "  type: whole number   default: 1   range: at least 1",
            "  changes: results",
            "  meaning: Passes of the actor over the rollouts of a",
        ]
    assert lines[0].split()[0] == ("key" if columns >= 120 else "ppo.epochs")
