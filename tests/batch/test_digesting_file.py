"""A full disk is reported again when the file is closed: the writer may have swallowed the first error."""

import errno
from pathlib import Path

import pytest

from ppoctl.core.batch.digest import DigestingFile, file_digest


def test_digesting_file_digests_bytes_during_write(tmp_path: Path) -> None:
    file = DigestingFile(tmp_path / "a")
    assert file.write(b"ab") + file.write(memoryview(b"cde")) == 5
    file.close()
    assert file.digest == file_digest(tmp_path / "a")


def test_digesting_file_close_raises_on_full_disk() -> None:
    # The data are as large as a tensor: Python buffers none of it, and closing alone would report no error.
    file = DigestingFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space"):
        file.write(bytes(1 << 20))
    with pytest.raises(OSError, match="No space") as raised:
        file.close()
    assert raised.value.errno == errno.ENOSPC
