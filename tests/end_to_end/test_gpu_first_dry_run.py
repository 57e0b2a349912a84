"""The dry run of `benchmarks/gpu_first.py`: every part finds what it measures, on a CPU with tiny models."""

import json
import sys
from pathlib import Path

import pytest

from end_to_end.cli_process import Forked

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_parts.lines import VARIABLE, Job, Skipped
from gpu_parts.runner import Options, run
from gpu_parts.table import PARTS

pytestmark = pytest.mark.engines
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


QUARTERS = 4


def test_pair_is_skipped_with_its_reason_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_parts import pair

    monkeypatch.setattr(pair, "CUDA", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(Skipped, match="two GPUs are needed, one is visible"):
        pair.pair()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.minutes(1.5)
@pytest.mark.one_each_time("pages")
@pytest.mark.parametrize("quarter", range(QUARTERS))
def test_every_part_of_the_dry_run_is_ok(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quarter: int
) -> None:
    def fork(job: Job, limit_s: float) -> str:
        monkeypatch.setenv(VARIABLE, job.as_json())
        with job.output.open("w") as output:
            code = forked.wait(forked.start(BENCHMARKS, ["gpu_parts.child"], output, output), timeout_s=limit_s)
        return "" if code in (0, 1) else f"its process ended with code {code}"

    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS))
    options, parts = Options(tmp_path, tiny=True, part_limit_s=300.0), list(PARTS.values())[quarter::QUARTERS]
    assert run(parts, options, child=fork) == 0, capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    names = [part.name for part in parts]
    assert [line["part"] for line in found if line.get("verdict") == "ok"] == names, "no part is skipped"
    for way in ("shared", "store") if "transfer" in names else ():
        of_way = [line for line in found if line.get("way") == way]
        assert [line["right"] for line in of_way if "right" in line] == [True] * 4
        assert {line["who"] for line in of_way if "who" in line} == {"engine", "trainer"}
        assert of_way[0]["read"] == ["OpenFile"]
