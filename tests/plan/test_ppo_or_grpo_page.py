"""docs/ppo-or-grpo.md shows what `plan` prints for its four commands."""

import re
import shlex
from pathlib import Path

import pytest

from ppoctl.cli.app import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ppo-or-grpo.md").read_text("utf-8")
PRINTED = {
    "GPUs of 80 GiB": r"stages, on the fullest of (\d+) GPUs",
    "responses": r"sequences +(\d+) =",
    "generated tokens, at most": r"generated tokens +at most (\S+)",
    "TFLOP, at most": r"computation +at most (\S+) TFLOP",
    "of them in generation": r"generation (\d+%)",
    "memory of the fullest GPU": r"\n  rollout +(\S+ GiB)  fits",
    "host memory of the node, at most": r"host memory .* at most (\S+ GiB)",
    "checkpoints on disk": r"\n  disk +(\S+ GiB), with",
    "records of a step, at most": r"records +at most (\S+ MiB) a step",
}
"""Row of the page's table -> the number in the output of `plan --full`."""


def value_in(output: str, pattern: str) -> str:
    """Return what a pattern finds; without a number of GPUs, there is one."""
    match = re.search(pattern, output)
    assert match or "GPUs" in pattern, pattern
    return match[1] if match else "1"


def test_cost_table_equals_output_of_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    layout = re.findall(r"```toml\n(\[model\].*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "7b.toml").write_text(layout, "utf-8")
    columns = []
    for command in re.findall(r"^ppoctl (plan .*)$", PAGE, re.MULTILINE):
        assert run(shlex.split(command)) == 0
        output = capsys.readouterr().out
        stages = dict(re.findall(r"\n  (\w+) +(\S+) GiB +fits", output))
        assert stages["rollout"] == max(stages.values(), key=float), "the page names the rollout as the largest stage"
        columns.append({row: value_in(output, pattern) for row, pattern in PRINTED.items()})
    table = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
    shown = {row: cells for row, *cells in table if len(cells) == len(columns) and row in PRINTED}
    assert shown == {row: [column[row] for column in columns] for row in PRINTED}
