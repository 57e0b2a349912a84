"""A conversion needs the memory of a few tensors, whatever the size of the model, and can be killed at any time."""

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from convert import big_model
from end_to_end.drill import in_a_process, kill_self

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 22, "vocab_size": 2048}
LAYER = 256 * (256 * 2 + 64 * 2 + 3 * 768) * 4


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return a model of 71 MB in float32, and its size in bytes."""
    folder = tmp_path_factory.mktemp("big") / "model"
    return folder, big_model.write_model(folder, torch.float32, 32 * 2**20, **SIZES)


def test_conversion_memory_is_a_few_tensors_in_both_directions(big: tuple[Path, int], tmp_path: Path) -> None:
    source, total = big
    assert total > 70e6
    small, reports = tmp_path / "small", tmp_path / "reports"
    big_model.write_model(small, torch.float32, 2**20, **SIZES | {"num_hidden_layers": 1})

    def both_ways(model: Path) -> list[dict[str, int]]:
        there, back = (tmp_path / f"{model.name} {where}" for where in ("there", "back"))
        to_megatron = big_model.memory_of_conversion(model, "megatron", there)
        return [to_megatron, big_model.memory_of_conversion(there, "hf", back)]

    def measure() -> None:
        both_ways(small)  # a forked process has the pages of libraries only after their first use
        reports.write_text(json.dumps(both_ways(source)))

    assert in_a_process(measure) == 0
    for report in json.loads(reports.read_text()):
        # Less than one tensor: the memory was not measured.
        assert LAYER / 10 < report["peak"] < total / 4, f"{report['peak'] / 1e6:.0f} MB for {LAYER / 1e6:.0f} MB"
        assert report["digests"] == 22 * 12 + 3


def test_killed_conversion_leaves_nothing_and_a_retry_succeeds(big: tuple[Path, int], tmp_path: Path) -> None:
    source, _ = big
    out, half = tmp_path / "out", tmp_path / ".out.converting" / "__0_0.distcp"

    def kill() -> None:
        while not (half.is_file() and half.stat().st_size > 10e6):
            time.sleep(0.01)
        kill_self()

    def die() -> None:
        threading.Thread(target=kill, daemon=True).start()
        big_model.converted(source, "megatron", out)

    assert in_a_process(die) == signal.SIGKILL, "it was too quick to be killed"
    assert half.exists()
    assert not out.exists()
    big_model.converted(source, "megatron", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
