"""The README contains the commands that a new user types first."""

import re

from conventions.conftest import ROOT


def test_readme_lists_both_commands_for_clean_checkout() -> None:
    """On a clean checkout a new user types one of the two; each creates the environment first."""
    blocks = re.findall(r"(?:^    .+\n)+", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    [block] = [block for block in blocks if re.search(r"^    make quickstart\b", block, re.MULTILINE)]
    assert re.findall(r"^    (make \w+)", block, re.MULTILINE) == ["make quickstart", "make test"]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in ("quickstart", "test"):
        assert f"\n{target}: setup " in makefile
