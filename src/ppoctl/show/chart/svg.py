"""A picture as SVG. Text remains text, so that a reader can search the text and a browser can choose the fonts."""

from xml.sax.saxutils import escape, quoteattr

from ppoctl.show.chart.drawing import SIZE, Dot, Line, Picture, Shape


def svg(picture: Picture, title: str) -> str:
    """Return the content of the SVG file. `title` is the text that screen readers read."""
    size = f'width="{picture.width}" height="{picture.height}" viewBox="0 0 {picture.width} {picture.height}"'
    font = f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="{SIZE}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>'
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{_clean(title)}</title>", ground, *map(_shape, picture.shapes), "</svg>", ""])


def _shape(shape: Shape) -> str:
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dashes = ' stroke-dasharray="4 3"' if shape.is_dashed else ""
        stroke = f'stroke="{shape.colour}" stroke-width="{shape.width:g}"{dashes}'
        return f'<polyline points="{points}" fill="none" {stroke} stroke-linejoin="round"/>'
    if isinstance(shape, Dot):
        return f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" fill="{shape.colour}"/>'
    weight = ' font-weight="bold"' if shape.is_bold else ""
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor={quoteattr(shape.anchor)}'
    return f'<text {place} fill="{shape.colour}"{weight}>{_clean(shape.text)}</text>'


def _clean(text: str) -> str:
    """Return the text escaped for XML, with U+FFFD for characters that are not printable."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))
