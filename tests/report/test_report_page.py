"""The file of a report: what it may contain and run, where it may be written, and how large it may be."""

import base64
import hashlib
import html
import json
import re
import tomllib
from pathlib import Path

import pytest

from ppoctl.cli.app import run
from ppoctl.show.report import render_page, report_file
from ppoctl.show.report.render_page import FILES, SCRIPTS, inert
from ppoctl.show.report.report_file import write_report
from report.conftest import HOSTILE

AA_TEXT = 4.5
AA_GRAPHICS = 3.0
"""Minimum contrasts of WCAG 2.2, level AA."""


@pytest.fixture(scope="module")
def text(attacked: Path, runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of both runs, with markup written by a model and by a user."""
    return write_report([attacked, runs[1]], tmp_path_factory.mktemp("r") / "r.html", steps=2).path.read_text("utf-8")


def test_embedded_json_has_no_markup_characters() -> None:
    escaped = inert({"a": HOSTILE + "\u2028 & \ud800"})
    assert not set(escaped) & set("<>&")
    assert escaped.isascii()
    assert json.loads(escaped) == {"a": HOSTILE + "\u2028 & \ud800"}


def test_content_security_policy_allows_only_the_page_script(text: str) -> None:
    assert HOSTILE not in text
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    _, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)

    def sha256(source: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "script-src": sha256(script),
        "style-src": sha256(style),
    }
    assert text.index("Content-Security-Policy") < text.index("<style>")


def test_report_is_reproducible_except_for_its_time(runs: tuple[Path, Path], tmp_path: Path) -> None:
    both = [write_report(runs, tmp_path / name, steps=2).path.read_text() for name in ("a.html", "b.html")]
    timeless = [re.sub(r"Written by ppoctl .* UTC", "", text) for text in both]
    assert timeless[0] == timeless[1]
    assert "Written by ppoctl" in both[0]


def test_large_report_stays_below_its_limit_and_lists_omissions(runs: tuple[Path, Path], tmp_path: Path) -> None:
    whole = write_report([*runs] * 4, tmp_path / "whole.html", steps=1)
    written = write_report([*runs] * 4, tmp_path / "r.html", steps=1, most_bytes=whole.size)
    assert written.size == (tmp_path / "r.html").stat().st_size < whole.size
    assert 0 < written.samples < whole.samples
    assert whole.left_out == ()
    assert any("to stay below 2 MB" in each for each in written.left_out)
    assert "to stay below 2 MB" in written.path.read_text()


# --- where it is written -----------------------------------------------------------------------------------------


def test_report_command_prints_written_and_omitted_contents(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", str(runs[0]), "--steps", "1"]) == 0
    told = re.sub(r"[0-9.]+ KiB", "SIZE", capsys.readouterr().out)
    assert told == "report   first.html\nsize     SIZE\nruns     first\nsamples  16\n"
    assert run(["report", *map(str, runs), "--steps", "0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["runs"], told["samples"]) == ("first-second.html", ["first", "second"], 0)
    assert told["size"] == Path(told["path"]).stat().st_size
    assert 'id="samples"' not in Path(told["path"]).read_text()


def test_report_replaces_only_an_earlier_report(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.html"
    for _ in range(2):
        assert run(["report", str(runs[0]), "--steps", "0", "-o", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    out.write_text("<!doctype html><p>mine")
    capsys.readouterr()
    refused = {
        str(out): "exists and is not a report: it is not replaced",
        str(tmp_path): "is a folder",
        str(runs[0] / "report.html"): "which a report must not change",
    }
    for path, says in refused.items():
        assert run(["report", str(runs[0]), "-o", path]) == 2
        told = capsys.readouterr().err
        assert says in told
        assert f"hint: ppoctl report {runs[0]} -o another.html" in told
    assert out.read_text() == "<!doctype html><p>mine"
    assert run(["report", str(runs[0]), "--steps", "0", "-o", str(tmp_path / "no/r.html")]) == 8
    assert f"mkdir -p {tmp_path}/no" in capsys.readouterr().err


def test_non_runs_and_more_than_eight_runs_are_refused(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    assert run(["report", *[str(runs[0])] * 9]) == 2
    assert "`9` runs: a report compares at most 8" in capsys.readouterr().err


# --- style and script ----------------------------------------------------------------------------------------------


def test_page_files_are_small_ascii_and_all_included() -> None:
    files = sorted(path.name for path in FILES.iterdir())
    assert files == sorted([*SCRIPTS, "page.html", "style.css"])
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    [shipped] = settings["tool"]["setuptools"]["package-data"]["ppoctl.show.report"]
    assert sorted(path.name for path in FILES.parent.glob(shipped)) == files
    for name in files:
        lines = (FILES / name).read_bytes()
        assert lines.isascii(), name
        assert len(lines.splitlines()) < 300, name
    assert not any(
        part in (FILES / name).read_text() for name in SCRIPTS for part in ("</script", "<!--", "innerHTML")
    )


def colours(mode: str) -> dict[str, tuple[float, ...]]:
    """Return the named colors of the style in one mode, each as red, green and blue."""
    style = (FILES / "style.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    by_name: dict[str, tuple[float, ...]] = {}
    for part in (light,) if mode == "light" else (light, dark):
        for name, value in re.findall(r"--([\w-]+): ([^;]+);", part):
            parts = re.findall("..", value[1:]) if value.startswith("#") else value.split()
            by_name[name] = tuple(int(part, 16 if value.startswith("#") else 10) for part in parts)
    return by_name


def contrast(first: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    high, low = sorted((luminance(first), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_equals_the_wcag_definition() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((118, 118, 118), (255, 255, 255)) == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_have_enough_contrast(mode: str) -> None:
    palette = colours(mode)
    for name in ("text", "quiet", "good", "bad"):
        for ground in ("page", "raised"):
            assert contrast(palette[name], palette[ground]) >= AA_TEXT, (name, ground)
    for name in ("focus", *(f"r{at}" for at in range(8)), "up", "down"):
        assert contrast(palette[name], palette["page"]) >= AA_GRAPHICS, name
    alphas = re.findall(
        r"\.[ud]\d \{ background: rgb\(var\(--(up|down)\) / ([.\d]+)\)", (FILES / "style.css").read_text()
    )
    assert len(alphas) == 8
    for name, alpha in alphas:
        mixed = tuple(
            float(alpha) * a + (1 - float(alpha)) * b for a, b in zip(palette[name], palette["page"], strict=True)
        )
        assert contrast(palette["text"], mixed) >= AA_TEXT, (name, alpha)


def test_runs_also_differ_in_their_dash_patterns() -> None:
    style = (FILES / "style.css").read_text()
    dashes = [
        re.findall(rf"\.r{at} \{{[^}}]*?stroke-dasharray: ([\d ]+)", style) for at in range(report_file.MOST_RUNS)
    ]
    assert len({str(style) for style in dashes}) == report_file.MOST_RUNS
    assert render_page.SCRIPTS[0] == "start.js"
