"""The files that docs/your-own-loss.md contains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "your-own-loss.md"


def written(folder: Path, name: str) -> Path:
    """Write one file of the page into the folder, and return its path."""
    [text] = re.findall(rf"(?ms)^```\w+ my-task/{re.escape(name)}\n(.*?)^```$", PAGE.read_text("utf-8"))
    (folder / name).write_text(text, "utf-8")
    return folder / name
