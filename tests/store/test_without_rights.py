"""Errors of a process without permissions name what it could not read, without reading it another way."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from fakes.job import new_run_dir
from ppoctl.core.errors import PpoctlError
from ppoctl.store.disk_errors import refused
from ppoctl.store.recorded_run import RecordedRun


def message_without_rights(look: Callable[[], object]) -> str:
    """Return the error message and hint when a process without permissions calls `look`."""
    reading, writing = os.pipe()
    if not os.fork():
        text = "something else went wrong"
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            look()
        except PpoctlError as error:
            text = f"{error} | {error.hint}"
        except PermissionError as error:
            named = refused(error)
            text = f"{named} | {named.hint}" if named else "nothing"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as message:
        return message.read()


def test_unreadable_file_is_named_with_its_closed_folder() -> None:
    # Every parent folder must be accessible; otherwise `shut` cannot be reached at all.
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        shut = Path(above) / "shut"
        shut.mkdir(mode=0)
        message = message_without_rights((shut / "manifest.json").stat)
        shut.chmod(0o700)
    says = f"cannot use `{shut}/manifest.json`: Permission denied"
    assert message == f"{says} | check owner and permissions: ls -ld {shut}"


def test_unreadable_recipes_are_not_reported_missing() -> None:
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        paths = new_run_dir(Path(above) / "run")
        paths.root.chmod(0o755)
        paths.recipes.chmod(0)
        message = message_without_rights(lambda: RecordedRun(paths).recipes)
        paths.recipes.chmod(0o700)
    says = f"cannot read `{paths.recipes}`: Permission denied"
    assert message == f"{says} | check owner and permissions: ls -ld {paths.recipes}"


def test_permission_errors_without_a_file_are_left_unchanged() -> None:
    assert refused(PermissionError(13, "Permission denied")) is None
    assert refused(FileNotFoundError(2, "No such file or directory", "x")) is None


def test_read_only_file_system_is_reported(tmp_path: Path) -> None:
    named = refused(OSError(errno.EROFS, "Read-only file system", str(tmp_path / "run" / "journal.jsonl")))
    assert str(named) == f"cannot use `{tmp_path}/run/journal.jsonl`: the file system is read-only"
    assert named is not None
    assert named.hint == f"mount it read-write, then try again: findmnt -T {tmp_path}"
