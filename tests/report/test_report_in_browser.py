"""A report in a real browser. The page draws all its data without a network, on narrow and wide screens, in light and
dark mode, and works with the keyboard alone."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ppoctl.show.report.contents import contents
from ppoctl.show.report.render_page import FILES, html
from ppoctl.show.report.report_file import write_report
from ppoctl.show.report.run_reader import read_runs
from report.browser import Browser


@pytest.fixture(scope="module")
def one(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs[:1], tmp_path_factory.mktemp("one") / "one.html", steps=3).path


@pytest.fixture(scope="module")
def both(attacked: Path, runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with markup, written by a model and by a user, in their texts."""
    return write_report([attacked, runs[1]], tmp_path_factory.mktemp("both") / "both.html", steps=3).path


def given(file: Path) -> Any:
    """Return the data that the page contains."""
    [payload] = re.findall(r'id="data">(.*?)</script>', file.read_text("utf-8"))
    return json.loads(payload)


def test_report_draws_every_chart_without_network_requests(browser: Browser, both: Path) -> None:
    browser.open(both)
    assert browser.errors == []
    assert browser.asked == [both.as_uri()]
    folded = browser.js("document.querySelectorAll('details.further .chart').length")
    charts, data = browser.js("document.querySelectorAll('.chart').length"), given(both)
    assert charts == len(data["charts"])
    assert browser.js("Number(document.documentElement.dataset.ready)") == charts - folded + len(
        data["stages"]
    ) + len(data["waits"])
    assert folded > 0
    browser.js("document.querySelector('details.further').open = true")
    browser.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    assert browser.js("document.querySelectorAll('.chart .plot svg').length") == charts
    reward = next(at for at, chart in enumerate(data["charts"]) if chart["name"] == "reward/score_mean")
    lines = f"[...document.querySelectorAll('#plot-{reward} .line')]"
    points = browser.js(f"{lines}.map((line) => line.getAttribute('d').split(/[ML]/).length - 1)")
    assert points == [3, 2], "one for each step of each run"
    assert browser.errors == []


def test_markup_in_model_texts_is_not_executed(browser: Browser, both: Path) -> None:
    browser.open(both)
    data = given(both)
    titles = [sample_set["title"] for sample_set in data["sets"]]
    evaluation = next(at for at, title in enumerate(titles) if title.startswith("evaluation"))
    browser.js(f"document.getElementById('set').value = '{evaluation}'")
    browser.js("document.getElementById('set').dispatchEvent(new Event('change'))")
    assert "</script></pre><img src=x" in browser.js("document.querySelector('.sample').textContent")
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert browser.js("document.querySelectorAll('script').length") == 2
    assert "</script></pre><img src=x" in browser.js("document.querySelector('#recipe pre').textContent")
    assert browser.js("document.title") == "first and second: ppoctl report"
    assert browser.errors == []


OUTLINE = """(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  return {
    levels: all("h1, h2, h3, h4, h5, h6").map((heading) => Number(heading.tagName[1])),
    ids: all("[id]").map((element) => element.id),
    links: all("[href]").map((link) => link.getAttribute("href")),
    loads: all("[src], [srcset], [poster], [action], [data], [style], [onclick], [onload], [onerror]").length,
  };
})()"""


def test_headings_are_nested_and_links_stay_on_the_page(browser: Browser, both: Path) -> None:
    browser.open(both)
    outline = browser.js(OUTLINE)
    assert outline["levels"].count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(outline["levels"]))
    assert len(outline["ids"]) == len(set(outline["ids"]))
    assert {f"#{name}" for name in outline["ids"]} >= set(outline["links"])
    assert outline["loads"] == 0
    assert not any(word in (FILES / "style.css").read_text() for word in ("url(", "@import"))


def test_content_security_policy_blocks_an_injected_script(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.js("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title = 1\">')")
    browser.js("globalThis.made = document.createElement('script')")
    browser.js("made.textContent = 'document.title = 2'; document.body.append(made)")
    browser.js("new Promise((done) => setTimeout(done, 50))")
    assert browser.js("document.title") == "first: ppoctl report"
    assert len(browser.errors) >= 2
    assert all("Content Security Policy" in error for error in browser.errors)


CONTRASTS = (Path(__file__).parent / "contrasts.js").read_text("ascii")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_report_fits_the_screen_with_enough_contrast(browser: Browser, both: Path, width: int, scheme: str) -> None:
    browser.open(both, width=width, scheme=scheme)
    browser.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 20)))")
    assert browser.js("document.documentElement.scrollWidth") <= width
    columns = browser.js("getComputedStyle(document.querySelector('.charts')).gridTemplateColumns.split(' ').length")
    assert columns == (1 if width == 400 else 3)
    contrasts = browser.js(CONTRASTS)
    assert contrasts["read"] > 200
    assert contrasts["poor"] == []
    is_dark = browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    assert is_dark == (scheme == "dark")


ENDS = """[...document.querySelectorAll('#curves > .charts')].map((group) => {
  const charts = [...group.querySelectorAll('.chart')].map((each) => each.getBoundingClientRect());
  const first = charts.filter((each) => each.top === charts[0].top);
  return [charts.length, first.length, group.getBoundingClientRect().right - first.at(-1).right];
})"""
"""Return the charts of each group, the charts in its first row, and the pixels that this row leaves empty."""


def test_charts_fill_the_row_in_small_groups(browser: Browser, one: Path) -> None:
    browser.open(one, width=1400)
    groups = browser.js(ENDS)
    assert any(charts < 3 for charts, _, _ in groups), "a group of fewer charts than the row has room for"
    for charts, in_row, empty in groups:
        assert in_row == min(charts, 3)
        assert abs(empty) < 1, f"{charts} charts leave {empty} pixels"


def test_charts_are_readable_with_the_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.js("document.getElementById('plot-0').focus()")
    values = given(one)["charts"][0]["series"][0]
    names = ["role", "aria-valuenow", "aria-valuetext", "aria-label"]
    read = f"{names}.map((name) => document.activeElement.getAttribute(name))"
    assert browser.js(read)[:2] == ["slider", "3"]
    browser.press("ArrowLeft")
    role, now, text, label = browser.js(read)
    shown = f"step 2: {values['values'][1]:.4g} ({values['low'][1]:.4g} to {values['high'][1]:.4g})"
    assert (role, now, label) == ("slider", "2", "reward/score_mean by step")
    assert text.startswith(shown)
    assert "attempt 2 continues with step 3" in text
    assert browser.js("document.querySelector('#plot-0 + .readout').textContent") == text
    assert browser.js("document.querySelectorAll('#plot-0 .cursor').length") == 1
    browser.press("Home")
    assert browser.js(read)[1] == "1"
    browser.press("End")
    assert browser.js(read)[1] == "3"
    described = "document.getElementById(document.activeElement.getAttribute('aria-describedby')).textContent"
    assert browser.js(described).startswith(("rises from", "falls from", "stays at", "is "))


def test_waits_of_the_newest_steps_are_readable_with_the_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    steps, shapes = given(one)["waits"][0]["steps"], "document.querySelectorAll('.waits .plot rect').length"
    assert [step["step"] for step in steps] == [1, 2, 3]
    busy = [span for step in steps for spans in step["spans"] for span in spans if span[2] in ("works", "transfer")]
    assert browser.js(shapes) == len(busy)
    browser.js("document.querySelector('.waits .plot').focus()")
    names = ["role", "aria-label", "aria-valuetext"]
    read = f"{names}.map((name) => document.activeElement.getAttribute(name))"
    assert browser.js(read) == ["slider", "Who worked and who waited by step, first", steps[2]["says"]]
    assert browser.js(shapes) == len(busy) + 1, "the step is outlined"
    browser.press("Home")
    assert browser.js(read)[2] == steps[0]["says"]
    assert browser.js("document.querySelector('.waits .readout').textContent") == steps[0]["says"]
    assert browser.js("[...document.querySelectorAll('.waits tbody th')].map((cell) => cell.textContent)") == [
        "1", "2", "3"
    ]  # fmt: skip


def test_runs_with_other_steps_are_read_at_the_nearest_point(
    browser: Browser, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    report = contents(read_runs(runs), steps=0, room=1_000_000)
    chart = next(chart for chart in report.data["charts"] if chart["name"] == "reward/score_mean")
    chart["series"] = [
        {"run": 0, "steps": 0, "values": [0.1, 0.2, 0.3]},
        {"run": 1, "steps": 1, "values": [0.5, 0.6]},
    ]
    report.data["steps"][:2] = [[1, 3, 9], [2, 8]]
    file = tmp_path / "r.html"
    file.write_text(html({**report.words, "left_out": ()}, report.data))
    browser.open(file)
    number = report.data["charts"].index(chart)
    read = "document.activeElement.getAttribute('aria-valuetext')"
    browser.js(f"document.getElementById('plot-{number}').focus()")
    assert browser.js(read) == "step 9: first 0.3"
    browser.press("ArrowLeft")
    assert browser.js(read) == "step 8: first 0.3 at step 9; second 0.6"
    browser.press("ArrowLeft")
    assert browser.js(read).startswith("step 3: first 0.2; second 0.5 at step 2")


def test_pointer_shows_the_step_below(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.js("document.getElementById('plot-0').scrollIntoView({behavior: 'instant', block: 'center'})")
    box = browser.js("document.getElementById('plot-0').getBoundingClientRect().toJSON()")
    browser.point(box["right"] - 12, box["top"] + 60)
    assert browser.js("document.querySelector('#plot-0 + .readout').textContent").startswith("step 3: ")
    browser.point(box["left"] + 60, box["top"] + 60)
    assert browser.js("document.querySelector('#plot-0 + .readout').textContent").startswith("step 1: ")


def test_samples_and_tokens_are_readable_with_the_keyboard(browser: Browser, one: Path) -> None:
    browser.open(one)
    items = given(one)["sets"][0]["items"]
    title = "document.querySelector('.sample h3').textContent"
    assert browser.js(title) == items[0]["title"]
    browser.js("document.querySelector('.list').focus()")
    browser.press("ArrowDown", 2)
    assert browser.js(title) == items[2]["title"]
    assert browser.js("document.querySelector('.list [aria-selected=true]').id") == "sample-2"
    assert browser.js("document.querySelector('.list').getAttribute('aria-activedescendant')") == "sample-2"
    browser.press("ArrowUp")
    item = items[1]
    assert browser.js(title) == item["title"]
    browser.js("document.querySelector('.token').focus()")
    browser.press("ArrowRight")
    label = browser.js("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(f"token 2 of {len(item['tokens'])}: {json.dumps(item['tokens'][1])}, advantage ")
    assert browser.js("document.querySelector('.sample .readout').textContent") == label
    assert browser.js("document.activeElement.title") == label
    browser.press("End")
    assert browser.js("document.activeElement.title").startswith(f"token {len(item['tokens'])} of")


def test_token_colours_follow_the_column_with_underline_styles(browser: Browser, one: Path) -> None:
    browser.open(one)
    items = given(one)["sets"][0]["items"]
    number, item = next((at, item) for at, item in enumerate(items) if min(item["advantage"]) < 0)
    browser.js("document.querySelector('.list').focus()")
    browser.press("ArrowDown", number)
    for column in ("advantage", "value", "kl"):
        browser.js(f"document.querySelector('input[value={column}]').click()")
        largest = max(map(abs, item[column]))
        tokens = "[...document.querySelectorAll('.token')]"
        shades = browser.js(f"{tokens}.map((token) => token.className.split(' ')[1])")
        is_near_0 = [value == 0 or abs(value) < 0.02 * largest for value in item[column]]
        sides = [
            "" if near else "u" if value > 0 else "d" for value, near in zip(item[column], is_near_0, strict=True)
        ]
        assert [shade[:1] for shade in shades] == sides, column
        lines = browser.js(f"{tokens}.map((token) => getComputedStyle(token).borderBottomStyle)")
        assert lines == ["dotted" if side == "d" else "solid" for side in sides]


def test_first_tab_stop_is_the_skip_link(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.press("Tab")
    assert browser.js("document.activeElement.className") == "skip"
    assert browser.js("document.activeElement.getBoundingClientRect().left") >= 0, "it is seen when it has the focus"
    browser.press("Enter")
    assert browser.js("document.activeElement.id") == "main"
    places = []
    for _ in range(200):
        browser.press("Tab")
        place = browser.js("document.activeElement.closest('section')?.id ?? null")
        # After the last one, Chromium focuses the page or, sometimes at once, its first link. On a slow machine, it
        # may also begin there.
        if place is not None:
            places.append(place)
        elif places:
            break
    order = list(dict.fromkeys(places))
    assert order == [
        name for name in ("overview", "curves", "time", "samples", "recipe", "attempts") if name in order
    ]
    assert {"curves", "time", "samples", "recipe", "attempts"} <= set(order)
    assert places == sorted(places, key=order.index), "nobody is sent back"


def test_every_focusable_element_has_a_name(browser: Browser, both: Path) -> None:
    browser.open(both)
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and any(entry["name"] == "focusable" for entry in node.get("properties", ()))
    ]
    assert {"slider", "listbox", "option", "combobox", "radio", "link", "region"} <= {role for role, _ in focusable}
    assert [role for role, name in focusable if not name.strip()] == []
    roles = {node["role"]["value"] for node in nodes if not node["ignored"]}
    assert {"banner", "navigation", "main", "contentinfo"} <= roles


def test_chart_values_are_available_as_a_table(browser: Browser, one: Path) -> None:
    browser.open(one)
    browser.js("document.querySelector('.chart details.table').open = true")
    browser.js("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    cells = "[...document.querySelectorAll('.rows tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows, series = browser.js(cells), given(one)["charts"][0]["series"][0]
    assert rows[0] == ["step", "value"]
    assert [row[0] for row in rows[1:]] == ["1", "2", "3"]
    assert [float(row[1].split()[0]) for row in rows[1:]] == pytest.approx(series["values"], rel=1e-3)


def test_reduced_motion_disables_smooth_scrolling(browser: Browser, one: Path) -> None:
    behaviour = "getComputedStyle(document.documentElement).scrollBehavior"
    browser.open(one)
    assert browser.js(behaviour) == "smooth"
    browser.open(one, motion="reduce")
    assert browser.js(behaviour) == "auto"
