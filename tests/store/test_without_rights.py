"""What a disk refuses to whoever has no rights, told without a look at what nobody may look at."""

import os
import tempfile
from pathlib import Path

from ppoctl.store.disk import refused


def told_to_nobody(path: Path) -> str:
    """What is said, hint and all, when a process without rights looks at the path."""
    reading, writing = os.pipe()
    if not os.fork():
        text = "something else went wrong"
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            path.stat()
        except PermissionError as error:
            named = refused(error)
            text = f"{named} | {named.hint}" if named else "nothing"
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    os.wait()
    with os.fdopen(reading) as told:
        return told.read()


def test_a_file_below_a_shut_folder_is_named_and_the_folder_is_what_to_look_at() -> None:
    # Every folder above must let others in, or nobody sees `shut` at all.
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        shut = Path(above) / "shut"
        shut.mkdir(mode=0)
        told = told_to_nobody(shut / "manifest.json")
        shut.chmod(0o700)
    says = f"cannot use `{shut}/manifest.json`: Permission denied"
    assert told == f"{says} | look at owner and rights: ls -ld {shut}"


def test_an_error_without_a_file_or_of_another_kind_is_left_as_it_is() -> None:
    assert refused(PermissionError(13, "Permission denied")) is None
    assert refused(FileNotFoundError(2, "No such file or directory", "x")) is None
