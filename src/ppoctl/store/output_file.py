"""A file that the user named with `--out`: complete or not there. Imports no torch."""

import os
from pathlib import Path

from ppoctl.core.errors import StorageError, quoted


def write_output(path: Path, data: bytes) -> None:
    """Write the file. A complete file replaces an earlier one; a device or a pipe, such as `/dev/stdout`, gets the
    bytes. Raises StorageError; an earlier file is then unchanged."""
    target = path.resolve()  # a link stays a link
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        try:
            aside.write_bytes(data)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        folder = path.parent
        hint = f"df -h {quoted(folder)} && ls -ld {quoted(folder)}"
        if not folder.is_dir():
            hint = f"mkdir -p {quoted(folder)}"
        raise StorageError(f"cannot write `{path}`: {error.strerror or error}", hint=hint) from error
