"""The runner of the first test on a GPU: limits, skipping, output, and parts that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gpu_parts.lines import VARIABLE, Job
from gpu_parts.runner import Options, run
from gpu_parts.table import PARTS, Part

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIMIT_S = 6.0


@pytest.fixture(autouse=True)
def _parts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def part(name: str, **others: Any) -> Part:
    return Part(name, f"gpu_first_parts:{name}", others.pop("expected_s", 1.0), **{"on_cpu": "yes", **others})


def lines(out: Path, name: str) -> list[dict[str, Any]]:
    records = []
    for line in (out / "lines.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            assert line == '{"part": "stops_in_mid_line", "ri'
    return [line for line in records if line["part"] == name]


def verdict(out: Path, name: str) -> dict[str, Any]:
    return lines(out, name)[-1]


def test_passing_part_is_ok_and_leaves_no_traceback(tmp_path: Path) -> None:
    """The limit of the command replaces that of the part."""
    assert run([part("works", limit_s=0.0)], Options(tmp_path, part_limit_s=600.0)) == 0
    assert verdict(tmp_path, "works")["verdict"] == "ok"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lines.jsonl"]


def test_hanging_part_is_ended_with_its_processes_and_its_stack_is_saved(tmp_path: Path) -> None:
    assert run([part("hangs_with_a_process", limit_s=LIMIT_S), part("works")], Options(tmp_path)) == 1
    assert "longer than its limit of 6 s" in verdict(tmp_path, "hangs_with_a_process")["wrong"][0]
    assert "waits_for_ever" in (tmp_path / "traceback-hangs_with_a_process.txt").read_text()
    assert verdict(tmp_path, "works")["verdict"] == "ok"
    pid = lines(tmp_path, "hangs_with_a_process")[0]["pid"]
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_crashing_part_does_not_end_the_others(tmp_path: Path) -> None:
    assert run([part("crashes"), part("works")], Options(tmp_path)) == 1
    assert "SIGSEGV" in verdict(tmp_path, "crashes")["wrong"][0]
    assert "in crashes" in (tmp_path / "traceback-crashes.txt").read_text()
    assert verdict(tmp_path, "works")["verdict"] == "ok"


def test_truncated_line_does_not_affect_later_parts(tmp_path: Path) -> None:
    assert run([part("stops_in_mid_line"), part("works")], Options(tmp_path)) == 1
    assert verdict(tmp_path, "stops_in_mid_line")["wrong"][0].startswith("its process ended with code 3")
    assert verdict(tmp_path, "works")["verdict"] == "ok"


def test_error_of_a_part_is_its_result_and_traceback_is_saved(tmp_path: Path) -> None:
    assert run([part("fails")], Options(tmp_path)) == 1
    assert verdict(tmp_path, "fails")["wrong"] == [
        "error: RuntimeError: an illegal memory access was encountered",
    ]
    assert "in fails" in (tmp_path / "traceback-fails.txt").read_text()


def test_measurements_of_a_part_are_checked(tmp_path: Path) -> None:
    ipc = Part("ipc", "gpu_first_parts:measures_wrongly", 1.0, on_cpu="yes")
    assert run([ipc, part("is_silent")], Options(tmp_path)) == 1
    assert "`right` is false" in verdict(tmp_path, "ipc")["wrong"][0]
    assert verdict(tmp_path, "is_silent")["wrong"] == ["nothing was measured"]


def test_parts_over_the_budget_are_skipped_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = part("hangs", expected_s=90.0)
    assert run([part("works"), long, part("skips")], Options(tmp_path, budget_s=60.0)) == 0
    reason = verdict(tmp_path, "hangs")["skipped"]
    assert reason.startswith("takes about 90 s, ")
    assert reason in capsys.readouterr().out
    assert lines(tmp_path, "skips"), "a shorter part after it still runs"


def test_budget_ends_a_part_that_takes_longer_than_expected(tmp_path: Path) -> None:
    assert run([part("hangs", limit_s=600.0)], Options(tmp_path, budget_s=LIMIT_S + 0.5)) == 1
    assert "longer than its limit of 6 s" in verdict(tmp_path, "hangs")["wrong"][0]


@pytest.mark.parametrize(
    ("name", "on_cpu", "reason"),
    [
        ("skips", "yes", "no such kernel"),
        ("is_silent", "tiny", "no cuda"),
        pytest.param("works", "no", "no cuda", marks=pytest.mark.ci("is_silent-tiny")),
    ],
)
def test_part_unsupported_on_this_machine_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, on_cpu: str, reason: str
) -> None:
    assert run([part(name, on_cpu=on_cpu)], Options(tmp_path)) == 0
    assert verdict(tmp_path, name)["verdict"] == f"skipped: {reason}"
    assert f"{name:<10}" in capsys.readouterr().out


def test_dry_run_requires_no_gpu(tmp_path: Path) -> None:
    assert run([part("works", on_cpu="tiny")], Options(tmp_path, tiny=True)) == 0
    assert verdict(tmp_path, "works")["verdict"] == "ok"


def test_engine_parts_are_skipped_without_vllm(tmp_path: Path) -> None:
    """Run with the base interpreter of this environment, which has no packages: neither vLLM nor torch is
    imported."""
    job = Job("works", "gpu_first_parts:works", out=str(tmp_path), needs_vllm=True, on_cpu="yes")
    environment = {**os.environ, VARIABLE: job.as_json(), "PYTHONPATH": f"{BENCHMARKS}:{Path(__file__).parent}"}
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    subprocess.run([python, "-m", "gpu_parts.child"], env=environment, check=True)
    assert lines(tmp_path, "works") == [{"part": "works", "skipped": "no vllm"}]


def test_gpu_check_screen_has_a_line_per_part_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([part("works", figures=("number", "absent")), part("fails"), part("skips")], Options(tmp_path))
    above, table = capsys.readouterr().out.split("\n\n")
    first, second, third = above.splitlines()
    assert first.split()[0] == "works"
    assert first.endswith("ok        number 7")
    assert "RuntimeError: an illegal memory access" in second
    assert "skipped: no such kernel" in third
    rows = table.splitlines()
    assert [row.split()[0] for row in rows if row[0] != " "][:4] == ["part", "works", "fails", "skips"]
    assert "an illegal memory access" in table


def test_part_limits_are_at_most_five_minutes() -> None:
    assert max(each_part.limit_s for each_part in PARTS.values()) <= 300
    assert all(each_part.expected_s < each_part.limit_s for each_part in PARTS.values())


def test_unknown_part_is_refused_with_all_part_names() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_first.py"), "atention"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "atention" in ended.stderr
    assert all(name in ended.stderr for name in PARTS)
