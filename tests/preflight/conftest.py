"""A folder with a complete recipe, the quickstart's model and a few rows, for tests to break."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipe.conftest import SMALLEST

MODEL = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
ROWS = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(5)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with `r.toml`, `base/` and `train.jsonl`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, tmp_path / "base")
    (tmp_path / "r.toml").write_text(SMALLEST, "utf-8")
    (tmp_path / "train.jsonl").write_text("\n".join(ROWS) + "\n", "utf-8")
    return tmp_path


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` removes one."""
    found = {**json.loads(file.read_text("utf-8")), **changes}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}), "utf-8")


def edit_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file, without changing the tensor data."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + length :])
