"""Files that the user named: a failed write keeps the earlier file."""

import os
import threading
from pathlib import Path

import pytest

from ppoctl.core.errors import StorageError
from ppoctl.store import eval_samples
from ppoctl.store.output_file import write_output
from store.conftest import Disk

ROWS = [
    {"set": "a", "mode": "greedy", "prompt_id": str(number), "sample": 0, "score": 1.0, "text": "x" * 50}
    for number in range(40)
]


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_full_disk_keeps_the_earlier_samples(tmp_path: Path, disk: Disk, name: str) -> None:
    out = tmp_path / name
    eval_samples.write(out, ROWS[:1])
    before = out.read_bytes()
    with disk(100), pytest.raises(StorageError, match=r"cannot write `.*/samples.*`: File too large") as caught:
        eval_samples.write(out, ROWS)
    assert caught.value.hint == f"df -h {tmp_path} && ls -ld {tmp_path}"
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
    eval_samples.write(out, ROWS)
    assert eval_samples.read(out) == ROWS


def test_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    link = tmp_path / "link"
    link.symlink_to("there/file")
    write_output(link, b"new")
    assert (link.readlink(), (tmp_path / "there" / "file").read_text()) == (Path("there/file"), "new")


def test_pipe_gets_the_bytes(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=write_output, args=(pipe, b"bytes"))
    writing.start()
    assert pipe.read_bytes() == b"bytes"
    writing.join()
    assert pipe.is_fifo()


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        write_output(tmp_path, b"x")
