"""Conversations in a report: turns, observations and ends, in the page's data and in a real browser."""

from pathlib import Path
from typing import Any

import pytest

from ppoctl.show.report import report_samples
from ppoctl.show.report.contents import contents
from ppoctl.show.report.render_page import html
from ppoctl.show.report.run_reader import read_runs
from report.browser import Browser
from store.episodes_on_disk import HOSTILE, run_of_episodes


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the samples of step 1 and of its evaluation."""
    [run] = read_runs([run_of_episodes(tmp_path_factory.mktemp("conversations") / "episodes").root])
    return [*report_samples.rollouts(run, 0, 1), *report_samples.evaluations(run, 0)]


def item(sample_set: dict[str, Any], prompt: str) -> dict[str, Any]:
    [found] = [each for each in sample_set["items"] if each["title"] == f"{prompt} #0"]
    return dict(found)


def test_parts_of_an_episode_are_ranges_of_its_tokens(sets: list[dict[str, Any]]) -> None:
    found = item(sets[0], "q0")
    assert found["ended"] == "terminated after 19 tokens in 2 turns (done: the environment ended the episode)"
    assert [(part["title"], part["turn"], part.get("from"), part.get("to")) for part in found["parts"]] == [
        ("Turn 1: 12 tokens, reward 0, mean value +1.550, mean advantage +4.500", True, 0, 12),
        ("Observation: 4 tokens, not in the loss", False, 12, 16),
        ("Turn 2: 3 tokens, reward 1.5, mean value +2.700, mean advantage +16.000", True, 16, 19),
        ("Observation: not in the response", False, None, None),
    ]
    assert [part["text"] for part in found["parts"]] == [None, None, None, "tool: right"]
    assert found["parts"][0]["calls"] == ['calculator {"digits": 2, "expression": "12*7"}']
    assert found["mask"] == [True] * 12 + [False] * 4 + [True] * 3
    assert found["value"][11:17] == [2.1, None, None, None, None, 2.6]


def test_tokens_that_do_not_fit_cut_the_parts(tmp_path: Path) -> None:
    [run] = read_runs([run_of_episodes(tmp_path / "episodes").root])
    found = item(report_samples.rollouts(run, 0, 1, most_tokens=14)[0], "q0")
    assert [(part.get("from"), part.get("to")) for part in found["parts"]] == [(0, 12), (12, 14), (None, None)]
    assert (found["cut"], len(found["mask"]), len(found["advantage"])) == (5, 14, 14)


def test_failure_and_evaluation_have_their_texts(sets: list[dict[str, Any]]) -> None:
    died = item(sets[0], "q1")
    assert died["ended"] == "terminated after 2 tokens in 1 turn (died: the environment's process ended)"
    assert died["parts"][-1]["text"] == f"died: exit code -9\n{HOSTILE}"
    assert "mask" not in died
    evaluated = item(sets[1], "q2")
    assert evaluated["ended"] == "truncated after 9 tokens in 2 turns (tokens: a limit of tokens)"
    assert [(part["title"], part["text"]) for part in evaluated["parts"]] == [
        ("Turn 1", "{{"), ("Observation", "tool: no"), ("Turn 2", "44"),
    ]  # fmt: skip


@pytest.fixture
def page(runs: tuple[Path, Path], sets: list[dict[str, Any]], tmp_path: Path) -> Path:
    report = contents(read_runs(runs[:1]), steps=0, room=1_000_000)
    file = tmp_path / "r.html"
    file.write_text(html({**report.words, "sets": 2, "left_out": ()}, {**report.data, "sets": sets}))
    return file


def test_browser_shows_turns_observations_and_hostile_text(
    browser: Browser, page: Path, sets: list[dict[str, Any]]
) -> None:
    browser.open(page)
    at = sets[0]["items"].index(item(sets[0], "q0"))
    browser.js("document.querySelector('.list').focus()")
    browser.press("ArrowDown", at)
    groups = "[...document.querySelectorAll('.tokens > [role=group]')]"
    assert browser.js(f"{groups}.map((each) => each.className)") == ["turn", "observation", "turn"]
    assert browser.js(f"{groups}.map((each) => each.querySelectorAll('.token').length)") == [12, 4, 3]
    assert browser.js(f"{groups}[1].querySelectorAll('.token.observed').length") == 4
    assert browser.js(f"{groups}[0].textContent").endswith('call: calculator {"digits": 2, "expression": "12*7"}')
    browser.js("document.querySelector('.token').focus()")
    browser.press("ArrowRight", 12)
    assert browser.js("document.activeElement.title") == 'token 13 of 19: "<|user|>", not in the loss'
    browser.js("document.querySelector('input[value=value]').click()")
    # All generated values are from 1.0 to 2.8: the smallest has the weakest shade, although observations have none.
    shades = browser.js("[...document.querySelectorAll('.token')].map((each) => each.className)")
    assert [shades[0], shades[-1], shades[12]] == ["token u1", "token u4", "token observed"]
    assert browser.js((Path(__file__).parent / "contrasts.js").read_text("ascii"))["poor"] == []
    hostile = sets[0]["items"].index(item(sets[0], "q3"))
    browser.js(f"document.getElementById('sample-{hostile}').click()")
    assert browser.js("document.querySelectorAll('.sample b').length") == 0
    assert "\\u001b]0;owned" in browser.js("document.querySelector('.sample').textContent")
    browser.js("document.getElementById('set').value = '1'")
    browser.js("document.getElementById('set').dispatchEvent(new Event('change'))")
    browser.js(f"document.getElementById('sample-{sets[1]['items'].index(item(sets[1], 'q2'))}').click()")
    texts = browser.js("[...document.querySelectorAll('.sample .text')].map((each) => each.ariaLabel)")
    assert texts == ["Prompt", "Turn 1", "Observation", "Turn 2"]
    assert browser.js("document.querySelector('.sample .text.observation').textContent") == "tool: no"
    assert browser.errors == []
