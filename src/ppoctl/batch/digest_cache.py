"""Digests of large files, kept between commands: a model of hundreds of gigabytes is read once, not at every
submission. What a run is made from is read again, all of it, when the run starts on its nodes."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppoctl.batch.digest import FileDigest

OnDigestProgress = Callable[[Path, int, int], None]
"""Callback that hears of a file how many of its bytes have been read, and how many it has."""

BLOCK_BYTES = 16 * 2**20
MOST_KEPT = 10_000
"""Files whose digests are kept, the ones that were read last."""
SETTLED_NS = 2 * 10**9
"""Age from which on a file's time tells whether it was written again: some file systems' clocks tick every 2 s."""


def kept_digest(path: Path, progress: OnDigestProgress | None = None) -> FileDigest:
    """SHA-256 and size of a file: from the cache where it lies there for this very file (name, size, times, inode),
    else read, and kept. Raises OSError."""
    place = str(path.resolve())
    with path.open("rb") as file:
        now = os.fstat(file.fileno())
        kept = _kept().get(place)
        if isinstance(kept, dict) and kept.get("file") == _identity(now) and isinstance(kept.get("sha256"), str):
            return FileDigest(kept["sha256"], now.st_size)
        digest, done = hashlib.sha256(), 0
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(path, done, now.st_size)
        after = os.fstat(file.fileno())
    is_settled = time.time_ns() - after.st_mtime_ns > SETTLED_NS
    if _identity(now) == _identity(after) and is_settled:
        _keep(place, {"file": _identity(after), "sha256": digest.hexdigest()})
    return FileDigest(digest.hexdigest(), done)


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ppoctl" / "digests.json"


def _kept() -> dict[str, Any]:
    """The digests that are kept, by path; none where there is no file, or another one's."""
    try:
        found = json.loads(_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(place: str, entry: dict[str, Any]) -> None:
    """Write a digest beside the others. Of two commands at once one may lose what it found, and reads it again."""
    kept = _kept()
    kept.pop(place, None)
    kept[place] = entry
    file = _file()
    aside = file.with_name(f".digests-{os.getpid()}.json")
    with suppress(OSError, RuntimeError):  # a home that cannot be written costs time, and nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(dict(list(kept.items())[-MOST_KEPT:])), "utf-8")
        aside.replace(file)
