"""Charts as lines of text, drawn with braille dots.

If braille or colour is not available, each run is drawn with a separate character.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ppoctl.show.chart.axis import Axis
from ppoctl.show.chart.panel import Panel, Point

MARKS = "*+ox#@%&"
"""Character of each run, if there is no colour."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a braille character, by row and column of its dots."""
_BRAILLE = 0x2800

Paint = Callable[[int, str], str]
"""Function that returns a text in the colour of a run. The run is given by its index."""


@dataclass(frozen=True)
class Style:
    """Size of the terminal, and whether it has braille and colour."""

    width: int
    height: int
    """Height of the plot in lines, without title and axis."""
    margin: int = 0
    """Minimum width of the labels of values, in characters. A common width aligns stacked plots."""
    unicode: bool = True
    paint: Paint | None = None
    """Function that colours text. None: there is no colour, so each of several runs has a separate character."""


def mark(style: Style, run: int, runs: int) -> str:
    """Return the symbol of a run in the legend."""
    if style.paint is None and (runs > 1 or not style.unicode):
        return MARKS[run % len(MARKS)]
    line = "\u2501\u2501" if style.unicode else "--"
    return line if style.paint is None else style.paint(run, line)


def chart(panel: Panel, steps: Axis, style: Style) -> list[str]:
    """Return the lines of one panel, the title first."""
    ends = {curve.run: curve.points[-1] for curve in panel.curves}
    labels = _labels(panel, style.height)
    margin = max(style.margin, *map(len, labels.values()), 0)
    canvas = _Canvas(style.width - margin - 2, style.height, _is_braille(panel, style))
    values = panel.values
    for curve in panel.curves:
        canvas.draw(curve.run, curve.points, steps, values, joined=not panel.is_rare)
    last = ", ".join(f"{value:.4g} at step {step}" for step, value in ends.values()) if len(ends) == 1 else ""
    lines = [f"{panel.title} ({panel.unit})" + (f": {last}" if last else "")]
    side, corner, flat = ("\u2502", "\u2514", "\u2500") if style.unicode else ("|", "+", "-")
    for number, text in enumerate(canvas.lines(style.paint)):
        lines.append(f"{labels.get(number, '').rjust(margin)} {side}{text}".rstrip())
    lines.append(f"{' ' * margin} {corner}{flat * canvas.columns}")
    return [*lines, f"{' ' * (margin + 2)}{_below(steps, canvas.columns)}".rstrip()]


def margin(panels: Sequence[Panel], height: int) -> int:
    """Return the width, in characters, that the labels of values of all these panels require."""
    return max((len(text) for panel in panels for text in _labels(panel, height).values()), default=0)


def _labels(panel: Panel, height: int) -> dict[int, str]:
    """Return line number -> label of a value."""
    values = panel.values
    return {round((1 - values.place(tick)) * (height - 1)): label for tick, label in values.ticks}


def _is_braille(panel: Panel, style: Style) -> bool:
    return style.unicode and (style.paint is not None or len({curve.run for curve in panel.curves}) == 1)


def _below(across: Axis, columns: int) -> str:
    """Return the line with the labels of steps. Labels that would overlap another label are left out."""
    text = [" "] * columns
    for tick, digits in across.ticks:
        start = min(max(0, round(across.place(tick) * (columns - 1)) - len(digits) // 2), columns - len(digits))
        if start >= 0 and not "".join(text[max(0, start - 1) : start + len(digits) + 1]).strip():
            text[start : start + len(digits)] = digits
    return "".join(text)


@dataclass
class _Canvas:
    """Cells of a plot: the dots that are set in each cell, and the run that set the last dot of the cell."""

    columns: int
    height: int
    is_braille: bool
    cells: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(row, column) of a cell -> (run, dots)."""

    def draw(self, run: int, points: Sequence[Point], across: Axis, up: Axis, *, joined: bool) -> None:
        """Draw a curve. If `joined` is True, draw lines between the points of the curve."""
        wide, high = (2, 4) if self.is_braille else (1, 1)
        places = [
            (
                round(across.place(step) * (self.columns * wide - 1)),
                round((1 - up.place(value)) * (self.height * high - 1)),
            )
            for step, value in points
        ]
        for place, following in zip(places, [*places[1:], places[-1]], strict=True):
            for x, y in _between(place, following) if joined else _blot(place, wide, self):
                self._set(run, x, y, wide, high)

    def _set(self, run: int, x: int, y: int, wide: int, high: int) -> None:
        place = y // high, x // wide
        before = self.cells.get(place, (run, 0))[1]
        self.cells[place] = run, before | (_DOTS[y % 4][x % 2] if self.is_braille else 1)

    def lines(self, paint: Paint | None) -> Iterator[str]:
        """Yield the cells as lines of text."""
        for row in range(self.height):
            cells = [self.cells.get((row, column), (None, 0)) for column in range(self.columns)]
            parts = groupby(cells, key=lambda cell: cell[0])  # one colour sequence for neighbouring cells
            yield "".join(self._text(run, [dots for _, dots in part], paint) for run, part in parts).rstrip()

    def _text(self, run: int | None, dots: Sequence[int], paint: Paint | None) -> str:
        if run is None:
            return " " * len(dots)
        text = (
            "".join(chr(_BRAILLE + each) for each in dots) if self.is_braille else MARKS[run % len(MARKS)] * len(dots)
        )
        return text if paint is None else paint(run, text)


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield all dots of a straight line."""
    (x, y), (to_x, to_y) = start, end
    count = max(abs(to_x - x), abs(to_y - y), 1)
    for number in range(count + 1):
        yield round(x + (to_x - x) * number / count), round(y + (to_y - y) * number / count)


def _blot(place: tuple[int, int], wide: int, canvas: _Canvas) -> Iterator[tuple[int, int]]:
    """Yield the dots of a single point: a square of four braille dots, or one character."""
    x, y = place
    if wide == 1:
        yield place
        return
    left, top = min(x, canvas.columns * 2 - 2), min(y, canvas.height * 4 - 2)
    yield from ((left + right, top + down) for right in (0, 1) for down in (0, 1))
