"""`ppoctl preview` shows rows as the model gets them, and flags what is unusual."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppoctl.cli.app import run
from preflight.conftest import edit
from preflight.conftest import folder as folder

TWICE = "".join(f'{{"question": "{n % 3} + 1?", "answer": "#### {n % 3 + 1}"}}\n' for n in range(4))


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["preview", "r.toml", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_preview_shows_text_tokens_and_end_tokens_of_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, "--rows", "1", "--set", 'rollout.stop_strings=["Q:"]')
    (row,) = found["rows"]
    assert row["text"] == "<|user|>0 + 1?<|assistant|>"
    assert "".join(token["text"] for token in row["tokens"]) == row["text"]
    assert row["mask"] == [False] * len(row["tokens"])
    assert (row["truth"], row["is_cut"]) == ("#### 1", False)
    assert [token["text"] for token in found["stops"]] == ["<|eos|>"]
    assert found["stop_strings"] == ["Q:"]
    assert found["counts"]["data.train"]["used"] == found["measured"] == 5
    assert found["lengths"]["max"] == len(row["tokens"])
    assert not any("repeat" in flag for flag in found["flags"])
    assert run(["preview", "r.toml"]) == 0
    out = capsys.readouterr().out
    assert "<|user|>1 + 1?<|assistant|>" in out
    first = row["tokens"][0]
    assert f"{first['id']} {first['text']!r}  {row['tokens'][1]['id']} " in out
    assert f"{len(row['tokens'])} tokens; a prompt is not trained on" in out


def test_preview_flags_repeated_and_truncated_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.jsonl").write_text(TWICE)
    found = json_of(capsys, "--set", "rollout.max_prompt_tokens=4", "--set", "data.train.long_prompts=cut")
    assert (
        "`data.train`: 1 of 4 rows repeat an earlier one; 4 are too long and are truncated; 4 are used"
        in found["flags"]
    )
    assert found["lengths"] == dict.fromkeys(("min", "p50", "p90", "p99", "max"), 4)
    assert all(row["is_cut"] for row in found["rows"])
    (folder / "base/chat_template.jinja").unlink()
    assert "the model has no chat template: prompts are plain text" in json_of(capsys)["flags"]


@pytest.mark.parametrize("end", ["<|user|>", ""])
def test_preview_flags_a_template_without_an_end_token(
    folder: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    template = "{% for m in messages %}<|user|>{{ m.content }}END{% endfor %}<|assistant|>"
    (folder / "base/chat_template.jinja").write_text(template.replace("END", end or "<|eos|>"))
    assert any("ends a turn with `<|user|>`" in flag for flag in json_of(capsys)["flags"]) == bool(end)


def test_preview_flags_a_model_without_an_end_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "generation_config.json"):
        if (folder / "base" / name).is_file():
            edit(folder / "base" / name, eos_token_id=...)
    assert any(flag.startswith("no end token: the model has none") for flag in json_of(capsys)["flags"])


def test_preview_selects_an_evaluation_set_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "held.jsonl").write_text(TWICE)
    held = 'data.eval.held={format="gsm8k", path="held.jsonl"}'
    found = json_of(capsys, "--set-name", "held", "--set", held)
    assert [row["id"].split("-")[0] for row in found["rows"]] == ["eval/held/000000", "eval/held/000001"]
    assert run(["preview", "r.toml", "--set-name", "other", "--set", held]) == 2
    assert "the recipe has no set `other`; it has `train`, `held`" in capsys.readouterr().err


def test_validate_counts_rows_that_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.jsonl").write_text(TWICE * 2)
    assert run(["validate", "r.toml", "--set", "data.train.duplicates=drop"]) == 4
    assert "`data.train` has 3 rows, but a step takes 4" in capsys.readouterr().err
    words = ["--set", "data.train.duplicates=drop", "--set", "rollout.prompts_per_step=2"]
    assert run(["validate", "r.toml", *words]) == 0
    assert "note: `data.train`: 5 of 8 rows repeat an earlier one; 3 are used" in capsys.readouterr().err
    assert run(["validate", "r.toml", "--set", "rollout.max_prompt_tokens=4"]) == 4
    assert "prompt tokens, but `rollout.max_prompt_tokens` is 4; 8 of 8 rows" in capsys.readouterr().err
