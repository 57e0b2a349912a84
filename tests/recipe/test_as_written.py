"""The paths written in recipe files, and no others."""

from pathlib import Path

import pytest

from ppoctl.recipe.loading.as_written import paths_as_written
from ppoctl.recipe.loading.load import load

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart.toml"


def test_relative_path_is_kept_as_written_in_its_file() -> None:
    folder = QUICKSTART.parent
    assert paths_as_written(load([QUICKSTART])) == {
        f"{folder}/quickstart/model": "quickstart/model",
        f"{folder}/quickstart/train.jsonl": "quickstart/train.jsonl",
        f"{folder}/quickstart/test.jsonl": "quickstart/test.jsonl",
    }


def test_paths_in_arrays_and_variables_are_kept_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", str(tmp_path))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"question": "1 + 1", "answer": "#### 2"}\n')
    text = '[data.train]\npath = ["$ROWS/a.jsonl", "b.jsonl"]\n'
    (tmp_path / "mine.toml").write_text(text, "utf-8-sig")  # with a byte order mark
    loaded = load([QUICKSTART, tmp_path / "mine.toml"], ["model.path=/elsewhere/model"])
    written = paths_as_written(loaded)
    assert written[f"{tmp_path}/a.jsonl"] == "$ROWS/a.jsonl"
    assert written[f"{tmp_path}/b.jsonl"] == "b.jsonl"
    assert not any("model" in path for path in written)
    assert f"{QUICKSTART.parent}/quickstart/train.jsonl" not in written, "another file has it replaced"
