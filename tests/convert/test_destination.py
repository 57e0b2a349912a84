"""A folder appears complete or not at all, even if the process that writes it is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError, StorageError
from ppoctl.models.convert.destination import destination

SLOW = """
import sys, time
from pathlib import Path
from ppoctl.models.convert.destination import destination
with destination(Path(sys.argv[1])) as aside:
    (aside / "half").write_text("written")
    print("writing", flush=True)
    time.sleep(60)  # until it is killed
"""


def test_destination_appears_only_when_complete(tmp_path: Path) -> None:
    with destination(tmp_path / "out") as aside:
        (aside / "file").write_text("whole")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "whole"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_error_leaves_no_destination(tmp_path: Path, error: type[BaseException]) -> None:
    def half() -> None:
        with destination(tmp_path / "out") as aside:
            (aside / "file").write_text("half")
            raise error

    with pytest.raises((error, StorageError)):
        half()
    assert not list(tmp_path.iterdir())


def test_existing_path_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(RecipeError, match="exists"), destination(tmp_path / "out"):
        pytest.fail("entered")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(RecipeError, match="exists"), destination(tmp_path / "link"):
        pytest.fail("entered")


def test_destination_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="during the conversion"), destination(tmp_path / "out"):
        (tmp_path / "out").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_writer_leaves_nothing_and_a_retry_succeeds(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW, tmp_path / "out"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        with pytest.raises(StorageError, match="being written by another process"), destination(tmp_path / "out"):
            pytest.fail("entered")
        os.kill(writer.pid, signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    with destination(tmp_path / "out") as aside:
        assert not list(aside.iterdir()), "half a file of the killed one"
        (aside / "file").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_full_disk_raises_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", str(tmp_path / "x"))
    with pytest.raises(StorageError, match="No space left"), destination(tmp_path / "out"):
        raise full
    assert not list(tmp_path.iterdir())
