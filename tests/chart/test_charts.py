"""Charts: axes computed by hand, exact lines of text, and pictures whose shapes are at the computed positions."""

import math
import xml.etree.ElementTree as ElementTree
from io import BytesIO

import pytest
from PIL import Image

from ppoctl.show.chart import drawing
from ppoctl.show.chart.axis import Axis, step_axis, value_axis
from ppoctl.show.chart.panel import Curve, Panel, aligned, curve
from ppoctl.show.chart.png import SCALE, png
from ppoctl.show.chart.svg import svg
from ppoctl.show.chart.terminal import Style, chart, margin, mark

RISING = Panel("reward/score_mean", "score", (Curve(0, ((1, 0.0), (2, 0.5), (3, 1.0))),))


@pytest.mark.parametrize(
    ("values", "ends", "labels"),
    [
        ([0.0, 1.0], (0.0, 1.0), ["0", "0.5", "1"]),
        ([0.71, 0.42], (0.42, 0.71), ["0.5", "0.6", "0.7"]),
        ([-1.3, 0.2, 1.1], (-1.3, 1.1), ["-1", "-0.5", "0", "0.5", "1"]),
        ([-70.0, -20.0], (-70.0, -20.0), ["-60", "-40", "-20"]),
        ([3e-7, 9e-7], (3e-7, 9e-7), ["4e-07", "6e-07", "8e-07"]),
        ([2e4, 1.1e7], (2e4, 1.1e7), ["2e+06", "4e+06", "6e+06", "8e+06", "1e+07"]),
        ([0.1 + 0.2, 0.9], (0.1 + 0.2, 0.9), ["0.4", "0.6", "0.8"]),
        # Six digits do not distinguish these labels.
        ([100000.0, 100000.3], (100000.0, 100000.3), ["100000", "100000.1", "100000.2", "100000.3"]),
        ([0.5, math.nan, 2.5, math.inf, None], (0.5, 2.5), ["0.5", "1", "1.5", "2", "2.5"]),
        # Equal values, and values that differ only by rounding errors
        ([5.0, 5.0], (4.5, 5.5), ["4.6", "4.8", "5", "5.2", "5.4"]),
        ([-2.0], (-2.2, -1.8), ["-2.2", "-2.1", "-2", "-1.9", "-1.8"]),
        ([0.3, 0.1 + 0.2], (0.27, 0.33), ["0.28", "0.3", "0.32"]),
        ([0.0, -0.0], (0.0, 1.0), ["0", "0.5", "1"]),
        ([0.0, 5e-324], (0.0, 5e-324), ["0"]),
        ([math.nan], (0.0, 1.0), ["0", "0.5", "1"]),
    ],
)  # fmt: skip
def test_value_axis_has_distinct_round_labels(
    values: list[float | None], ends: tuple[float, float], labels: list[str]
) -> None:
    axis = value_axis(values)
    assert (axis.low, axis.high) == pytest.approx(ends, rel=1e-9, abs=0)
    assert [label for _, label in axis.ticks] == labels
    assert [value for value, _ in axis.ticks] == [float(label) for label in labels]


def test_step_labels_are_whole_numbers() -> None:
    assert step_axis([3, 1, 2]) == Axis(1.0, 3.0, ((1.0, "1"), (2.0, "2"), (3.0, "3")))
    assert [label for _, label in step_axis([0, 8]).ticks] == ["0", "2", "4", "6", "8"]
    assert [label for _, label in step_axis(range(401)).ticks] == ["0", "100", "200", "300", "400"]
    assert [label for _, label in step_axis([7]).ticks] == ["7"]


def test_axis_places_values_between_its_ends() -> None:
    assert step_axis([1, 3]).place(1.5) == 0.25
    assert value_axis([5.0]).place(5.0) == 0.5


def test_curve_smooths_past_values_and_drops_non_finite() -> None:
    points = [(1, 1.0), (2, math.nan), (3, 2.0), (4, 6.0), (5, math.inf)]
    assert curve(0, points).points == ((1, 1.0), (3, 2.0), (4, 6.0))
    assert curve(0, points, smooth=2).points == ((1, 1.0), (3, 1.5), (4, 4.0))
    assert curve(0, points, smooth=9).points == ((1, 1.0), (3, 1.5), (4, 3.0))


def test_aligned_panels_cover_steps_of_all_panels() -> None:
    rare = Panel("eval/x/pass_at_1", "share", (Curve(0, ((0, 0.1), (8, 0.2))),), is_rare=True)
    assert aligned([RISING, rare]) == step_axis([0, 8])


def test_ascii_chart_matches_expected_lines() -> None:
    assert chart(RISING, step_axis([1, 3]), Style(14, 5, unicode=False)) == [
        "reward/score_mean (score): 1 at step 3",
        "  1 |       **",
        "    |      *",
        "0.5 |   ***",
        "    |  *",
        "  0 |**",
        "    +---------",
        "     1   2   3",
    ]


def test_text_chart_distinguishes_runs_without_colour() -> None:
    two = Panel("x", "share", (Curve(0, ((1, 0.0), (2, 0.0))), Curve(1, ((1, 1.0), (2, 1.0)))))
    for unicode in (False, True):
        style = Style(20, 4, unicode=unicode)
        lines = chart(two, step_axis([1, 2]), style)
        assert lines[0] == "x (share)"
        assert set(lines[1]) & {"*", "+"} == {mark(style, 1, 2)} == {"+"}
        assert set(lines[4]) & {"*", "+"} == {mark(style, 0, 2)} == {"*"}
        assert all(line.isascii() for line in lines) is not unicode


def test_text_chart_colours_curve_by_run() -> None:
    style = Style(20, 4, paint=lambda run, text: f"<{run}{text}>")
    two = Panel("x", "share", (Curve(0, ((1, 0.0), (2, 0.0))), Curve(1, ((1, 1.0), (2, 1.0)))))
    lines = chart(two, step_axis([1, 2]), style)
    assert lines[1].endswith(f"<1{chr(0x2809) * 15}>")
    assert lines[4].endswith(f"<0{chr(0x28C0) * 15}>")
    assert mark(style, 1, 2) == "<1\u2501\u2501>"


def test_braille_cell_has_two_by_four_dots() -> None:
    corners = Panel("x", "share", (Curve(0, ((0, 0.0), (1, 1.0))),), is_rare=True)
    lines = chart(corners, step_axis([0, 1]), Style(20, 3, margin=4))
    assert lines[1].endswith("\u281b")  # the upper four dots of the last character
    assert lines[3][6] == "\u28e4"  # the lower four of the first
    assert [len(line) for line in lines[4:]] == [20, 20]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_chart_fills_exactly_the_terminal_width(width: int) -> None:
    panel = Panel("x", "share", (curve(0, [(step, math.sin(step / 5)) for step in range(1, 400)]),))
    lines = chart(panel, step_axis([1, 399]), Style(width, 8, margin([panel, RISING], 8)))
    assert max(map(len, lines)) == width
    assert lines[-1].split() == ["50", "100", "150", "200", "250", "300", "350"]


def places(shape: object) -> tuple[tuple[float, float], ...]:
    assert isinstance(shape, drawing.Line)
    return shape.points


def test_picture_places_shapes_by_value() -> None:
    rare = Panel("eval/x/pass_at_1", "share", (Curve(0, ((0, 0.0), (4, 1.0))),), True, ((2, "resumed"), (9, "late")))
    chart = drawing.picture([rare], ["mine"])
    left, right = drawing.LEFT + 6, drawing.WIDTH - drawing.RIGHT - 6
    top = 4 + drawing.LINE
    high, low = top + drawing.TOP + 6, top + drawing.PANEL_HEIGHT - drawing.BOTTOM - 6
    assert [(dot.x, dot.y) for dot in chart.shapes if isinstance(dot, drawing.Dot)] == [(left, low), (right, high)]
    dashed = [shape for shape in chart.shapes if isinstance(shape, drawing.Line) and shape.is_dashed]
    assert [line.points[0][0] for line in dashed] == [(left + right) / 2]  # the step after it does not exist
    texts = {shape.text for shape in chart.shapes if isinstance(shape, drawing.Text)}
    assert {"mine", "eval/x/pass_at_1", "1 share at step 4", "resumed", "step", "0", "0.5", "1", "2", "4"} <= texts
    assert "late" not in texts
    assert all(
        0 <= x <= chart.width and 0 <= y <= chart.height
        for s in chart.shapes
        if isinstance(s, drawing.Line)
        for x, y in s.points
    )


def test_event_labels_of_one_step_do_not_overlap() -> None:
    happened = ((1, "resumed"), (1, "resumed"), (1, "health stop"), (2, "resumed"))
    near = Panel("x", "share", (curve(0, [(step, 1.0) for step in range(1, 99)]),), events=happened)
    texts = [shape.text for shape in drawing.picture([near], ["a"]).shapes if isinstance(shape, drawing.Text)]
    assert [text for text in texts if "resumed" in text] == ["resumed, health stop"]


def test_svg_escapes_text_and_control_characters() -> None:
    text = svg(drawing.picture([RISING], ["<a&b>\x1b"]), 'of "x" <y>')
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts[0] == "<a&b>\ufffd"
    assert "reward/score_mean" in texts
    assert root.findtext(f"{space}title") == 'of "x" <y>'
    [line] = [
        line
        for line in root.iter(f"{space}polyline")
        if line.get("stroke") == drawing.COLOURS[0] and line.get("stroke-width") == "1.8"
    ]
    assert len(str(line.get("points")).split()) == 3


def test_png_draws_curve_in_run_colour_at_its_value() -> None:
    level = Panel("x", "share", (Curve(1, ((1, 0.5), (9, 0.5))),))
    image = Image.open(BytesIO(png(drawing.picture([level], ["a", "b"]))))
    assert image.size == (drawing.WIDTH * SCALE, (4 + 2 * drawing.LINE + drawing.PANEL_HEIGHT + drawing.LINE) * SCALE)
    top = 4 + 2 * drawing.LINE
    middle = (top + drawing.TOP + top + drawing.PANEL_HEIGHT - drawing.BOTTOM) / 2
    expected = tuple(int(drawing.COLOURS[1][start : start + 2], 16) for start in (1, 3, 5))
    pixel = image.getpixel((drawing.WIDTH * SCALE // 2, round(middle * SCALE)))
    assert pixel == pytest.approx(expected, abs=3)
    assert image.getpixel((drawing.WIDTH * SCALE // 2, round((middle + 12) * SCALE))) == (255, 255, 255)
