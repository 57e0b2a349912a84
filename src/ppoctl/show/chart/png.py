"""A picture as a PNG file, drawn by Pillow, which is installed with vLLM.

The file has twice as many pixels as the picture in each direction, so that it is sharp.
"""

from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from ppoctl.show.chart.drawing import SIZE, Dot, Line, Picture, Text

SCALE = 2
"""Pixels of the file for each pixel of the picture, in each direction."""
FINER = 2
"""Factor by which lines are drawn larger and then scaled down, because Pillow does not antialias lines."""


def png(picture: Picture) -> bytes:
    """Return the content of the PNG file."""
    factor = SCALE * FINER
    large = Image.new("RGB", (picture.width * factor, picture.height * factor), "white")
    pen = ImageDraw.Draw(large)
    for shape in picture.shapes:
        if isinstance(shape, Line):
            _line(pen, shape, factor)
        elif isinstance(shape, Dot):
            pen.circle((shape.x * factor, shape.y * factor), shape.radius * factor, fill=shape.colour)
    image = large.resize((picture.width * SCALE, picture.height * SCALE), Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(SIZE * SCALE)
    for shape in picture.shapes:
        if isinstance(shape, Text):
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            place, thick = (shape.x * SCALE, shape.y * SCALE), 0.6 if shape.is_bold else 0
            pen.text(place, shape.text, shape.colour, font, anchor, stroke_width=thick, stroke_fill=shape.colour)
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def _line(pen: ImageDraw.ImageDraw, line: Line, factor: int) -> None:
    points = [(x * factor, y * factor) for x, y in line.points]
    width = max(1, round(line.width * factor))
    if not line.is_dashed:
        pen.line(points, line.colour, width, joint="curve")
        return
    [(x, top), (_, bottom)] = points  # dashed lines are vertical
    for y in range(round(top), round(bottom), 7 * factor):
        pen.line([(x, y), (x, min(y + 4 * factor, bottom))], line.colour, width)
