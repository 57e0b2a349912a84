"""A conversion needs the memory of a few tensors, whatever the size of the model, and can be killed at any time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from convert import big_model
from ppoctl.convert.command.convert_ckpt import ConvertRequest, convert

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 22, "vocab_size": 4096}
LAYER = 512 * (512 * 2 + 128 * 2 + 3 * 1536) * 4


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return a model of 280 MB in float32, and its size in bytes."""
    folder = tmp_path_factory.mktemp("big") / "model"
    return folder, big_model.write_model(folder, torch.float32, 64 * 2**20, **SIZES)


def converting(source: Path, *formats: str | Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, big_model.__file__, source, *formats]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_conversion_memory_is_a_few_tensors_in_both_directions(big: tuple[Path, int], tmp_path: Path) -> None:
    source, total = big
    assert total > 250e6
    with converting(source, tmp_path / "there", "megatron", tmp_path / "back", "hf") as process:
        assert process.stdout is not None
        reports = [json.loads(line) for line in process.stdout]
    assert [report["to"] for report in reports] == ["megatron", "hf"]
    for report in reports:
        assert report["peak"] < total / 4, f"{report['peak'] / 1e6:.0f} MB for layers of {LAYER / 1e6:.0f} MB"
        assert report["digests"] == 22 * 12 + 3


def test_killed_conversion_leaves_nothing_and_a_retry_succeeds(big: tuple[Path, int], tmp_path: Path) -> None:
    source, _ = big
    out = tmp_path / "out"
    with converting(source, out, "megatron") as process:
        half = tmp_path / ".out.converting" / "__0_0.distcp"
        while not (half.is_file() and half.stat().st_size > 20e6):
            assert process.poll() is None, "it was too quick to be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert not out.exists()
    convert(ConvertRequest(source=str(source), to="megatron", out=out, shard_gib=1.0, parity=False), lambda _: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
