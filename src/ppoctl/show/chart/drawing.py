"""A picture of vertically stacked panels, as shapes in pixels. SVG and PNG files are created from the picture."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppoctl.show.chart.axis import Axis
from ppoctl.show.chart.panel import Panel, aligned

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7b3294", "#c51b7d", "#8c6d31", "#444444", "#17a2b8")
"""Colours of the runs. People with red-green colour blindness can distinguish them."""
INK, GREY, PALE = "#222222", "#666666", "#dddddd"
SIZE = 12
"""Font size in pixels."""

WIDTH, PANEL_HEIGHT = 860, 200
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 42, 30
"""Margins of a panel for the labels, in pixels. The top margin contains the title and the names of events."""
LINE = 20
"""Height of a line of the legend, in pixels."""


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    colour: str
    radius: float = 3.0


@dataclass(frozen=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    colour: str = INK
    anchor: Literal["start", "middle", "end"] = "start"
    is_bold: bool = False


Shape = Line | Dot | Text


@dataclass(frozen=True)
class Picture:
    """Shapes on a white background, in drawing order."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def picture(panels: Sequence[Panel], runs: Sequence[str]) -> Picture:
    """Return a picture of all panels, stacked over a common step axis, with the legend on top."""
    steps = aligned(panels)
    shapes: list[Shape] = []
    legend = LINE * len(runs)
    for number, name in enumerate(runs):
        y = 16.0 + LINE * number
        shapes += [Line(((LEFT, y - 4), (LEFT + 24, y - 4)), _colour(number), 2.0), Text(LEFT + 32, y, name)]
    for number, panel in enumerate(panels):
        shapes += _panel(panel, steps, 4 + legend + number * PANEL_HEIGHT)
    height = 4 + legend + len(panels) * PANEL_HEIGHT + LINE
    shapes.append(Text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 8, "step", GREY, "middle"))
    return Picture(WIDTH, height, tuple(shapes))


def _panel(panel: Panel, steps: Axis, top: float) -> list[Shape]:
    values = panel.values
    low_y, high_y = top + PANEL_HEIGHT - BOTTOM, top + TOP

    def x(step: float) -> float:
        return LEFT + 6 + steps.place(step) * (WIDTH - LEFT - RIGHT - 12)

    def y(value: float) -> float:
        return low_y - 6 - values.place(value) * (low_y - high_y - 12)

    shapes: list[Shape] = [Text(LEFT, top + 18, panel.title, is_bold=True)]
    if len(panel.curves) == 1:
        step, value = panel.curves[0].points[-1]
        shapes.append(Text(WIDTH - RIGHT, top + 18, f"{value:.4g} {panel.unit} at step {step}", GREY, "end"))
    else:
        shapes.append(Text(WIDTH - RIGHT, top + 18, panel.unit, GREY, "end"))
    for tick, label in values.ticks:
        shapes.append(Line(((LEFT, y(tick)), (WIDTH - RIGHT, y(tick))), PALE))
        shapes.append(Text(LEFT - 8, y(tick) + 4, label, GREY, "end"))
    for tick, label in steps.ticks:
        shapes.append(Line(((x(tick), low_y), (x(tick), low_y + 4)), GREY))
        shapes.append(Text(x(tick), low_y + 18, label, GREY, "middle"))
    seen = [(step, word) for step, word in panel.events if steps.low <= step <= steps.high]
    shapes += _events(seen, x, low_y, high_y)
    shapes.append(Line(((LEFT, high_y), (LEFT, low_y), (WIDTH - RIGHT, low_y)), GREY))
    for curve in panel.curves:
        places = tuple((x(step), y(value)) for step, value in curve.points)
        shapes.append(Line(places, _colour(curve.run), 1.0 if panel.is_rare else 1.8))
        if panel.is_rare or len(places) == 1:
            shapes += [Dot(*place, _colour(curve.run)) for place in places]
    return shapes


def _events(
    events: Sequence[tuple[int, str]], x: Callable[[float], float], low_y: float, high_y: float
) -> list[Shape]:
    """Return a thin line for each step with events. The events are named if their names do not overlap other text."""
    shapes: list[Shape] = []
    free_from = 0.0
    for step in sorted({step for step, _ in events}):
        word = ", ".join(dict.fromkeys(word for at, word in events if at == step))
        shapes.append(Line(((x(step), high_y), (x(step), low_y)), GREY, 0.8, is_dashed=True))
        if x(step) >= free_from and x(step) + 7 * len(word) < WIDTH:
            shapes.append(Text(x(step), high_y - 4, word, GREY))
            free_from = x(step) + 7 * len(word) + 8
    return shapes


def _colour(run: int) -> str:
    return COLOURS[run % len(COLOURS)]
