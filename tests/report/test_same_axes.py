"""`ppoctl plot` and `ppoctl report` label a curve equally: on a terminal, in a picture, and in a real browser."""

import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.show.report.report_file import write_report
from ppoctl.store.journal import read_lines
from report.browser import Browser

STEPS = (1, 2, 7, 20)
CURVES = {
    "policy/entropy_mean": ([2.37, 1.9, 0.4, 0.83], ["0.5", "1", "1.5", "2"]),
    "policy/approx_kl": ([3.1e-8, 9e-8, 5e-8, 4e-8], ["4e-08", "6e-08", "8e-08"]),
    "policy/clip_frac": ([0.0, 0.0, 0.0, 0.0], ["0", "0.5", "1"]),
    "policy/grad_norm": ([1.25, 1.25, 1.25, 1.25], ["1.15", "1.2", "1.25", "1.3", "1.35"]),
    "value/loss": ([0.31, float("nan"), 0.11, 0.27], ["0.15", "0.2", "0.25", "0.3"]),
    "value/explained_variance": ([-2.2, -0.4, 0.3, 0.9], ["-2", "-1", "0"]),
    "throughput/generated_tokens_per_s": ([100000.0, 100000.3, 100000.1, 100000.2],
                                          ["100000", "100000.1", "100000.2", "100000.3"]),
}  # fmt: skip
"""Values at `STEPS`, and the labels of their axes by hand."""
STEP_LABELS = ["5", "10", "15", "20"]


@pytest.fixture(scope="module")
def recorded(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first run, with the curves above instead of its own."""
    copy = tmp_path_factory.mktemp("recorded") / "first"
    shutil.copytree(runs[0], copy)
    events = [line for line in read_lines(copy / "journal.jsonl") if line.get("event") == "attempt_started"][:1]
    lines = [
        {"step": step, "stage": "actor_update", "seconds": 2.5, "attempt": 1, "at": events[0]["at"] + step,
         "figures": {name: values[at] for name, (values, _) in CURVES.items()}, "clocked": {}}
        for at, step in enumerate(STEPS)
    ]  # fmt: skip
    numbered = ({**line, "seq": number} for number, line in enumerate([*events, *lines], start=1))
    (copy / "journal.jsonl").write_bytes(b"".join(map(sealed_line, numbered)))
    return copy


def asked() -> list[str]:
    return [word for name in CURVES for word in ("--metric", name)]


def test_terminal_labels_the_axes_by_hand(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plot", str(recorded), *asked()]) == 0
    charts = capsys.readouterr().out.split("\n\n")
    for chart, (name, (_, labels)) in zip(charts, CURVES.items(), strict=True):
        title, *lines, steps = chart.strip("\n").splitlines()
        assert title.startswith(name)
        found = [line.split("|")[0].split("\u2502")[0].strip() for line in lines[:-1]]
        assert [label for label in reversed(found) if label] == labels, name
        assert steps.split() == STEP_LABELS


def test_picture_labels_the_axes_by_hand(recorded: Path, tmp_path: Path) -> None:
    assert run(["plot", str(recorded), *asked(), "--out", str(tmp_path / "a.svg")]) == 0
    texts = list(ElementTree.parse(tmp_path / "a.svg").iter("{http://www.w3.org/2000/svg}text"))
    anchors = {
        anchor: [each.text for each in texts if each.get("text-anchor") == anchor] for anchor in ("end", "middle")
    }
    titles = re.compile(r".* at step \d+")
    assert [text for text in anchors["end"] if not titles.fullmatch(str(text))] == [
        label for _, labels in CURVES.values() for label in labels
    ]
    assert anchors["middle"] == [*STEP_LABELS * len(CURVES), "step"]


AXES = """Object.fromEntries([...document.querySelectorAll('.chart:has(svg)')].map((chart) => [
  chart.querySelector('h4').firstChild.textContent.trim(),
  ['end', 'middle'].map((side) =>
    [...chart.querySelectorAll(`.axis[text-anchor=${side}]`)].map((text) => text.textContent)),
]))"""
CLIPPED = """[...document.querySelectorAll('.axis')].map((text) => text.getBoundingClientRect())
  .filter((box) => box.left < 0 || box.right > document.documentElement.clientWidth).length"""
OVERLAPS = """[...document.querySelectorAll('.plot svg')].filter((svg) => {
  const boxes = [...svg.querySelectorAll('.axis[text-anchor=middle]')].map((text) => text.getBoundingClientRect());
  return boxes.some((box, at) => at > 0 && box.left < boxes[at - 1].right + 3);
}).length"""


@pytest.mark.parametrize("width", [480, 1280])
def test_report_labels_the_axes_by_hand(browser: Browser, recorded: Path, tmp_path: Path, width: int) -> None:
    browser.open(write_report([recorded], tmp_path / "r.html", steps=0).path, width=width)
    assert browser.errors == []
    assert browser.js(AXES) == {name: [labels, STEP_LABELS] for name, (_, labels) in CURVES.items()}
    assert browser.js(CLIPPED) == 0
    assert browser.js(OVERLAPS) == 0
    times = "['end', 'middle'].map((side) => [...document.querySelectorAll(`.stages .axis[text-anchor=${side}]`)]"
    assert browser.js(f"{times}.map((text) => text.textContent))") == [["0", "1", "2"], ["20"]]
