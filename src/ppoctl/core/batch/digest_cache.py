"""Cache of the digests of large files. Without the cache, every submission would read a model of hundreds of
gigabytes.

When a run starts on its nodes, it reads all its input files again and does not use this cache.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppoctl.core.batch.digest import FileDigest

OnDigestProgress = Callable[[Path, int, int], None]
"""Called with a file, its number of bytes read so far, and its size."""

BLOCK_BYTES = 16 * 2**20
MOST_KEPT = 10_000
"""Maximum number of digests in the cache; the digests of the most recently read files are kept."""
SETTLED_NS = 2 * 10**9
"""Age from which the modification time of a file is reliable: some file systems have a resolution of 2 s."""


def kept_digest(path: Path, progress: OnDigestProgress | None = None) -> FileDigest:
    """Return SHA-256 and size of a file, from the cache if the cache has an entry for this file with the same name,
    size, times and inode.

    Otherwise read the file and cache its digest. Raises OSError.
    """
    key = str(path.resolve())
    with path.open("rb") as file:
        now = os.fstat(file.fileno())
        kept = _kept().get(key)
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
        _keep(key, {"file": _identity(after), "sha256": digest.hexdigest()})
    return FileDigest(digest.hexdigest(), done)


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "ppoctl" / "digests.json"


def _kept() -> dict[str, Any]:
    """Return the cached digests by path; empty if the cache file is missing or invalid."""
    try:
        entries = json.loads(_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _keep(key: str, entry: dict[str, Any]) -> None:
    """Add a digest to the cache. If two commands write at once, one entry may be lost; the file of that entry is then
    read again."""
    kept = _kept()
    kept.pop(key, None)
    kept[key] = entry
    file = _file()
    temporary = file.with_name(f".digests-{os.getpid()}.json")
    with suppress(OSError, RuntimeError):  # if the home folder is not writable, the digest is only computed again
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(list(kept.items())[-MOST_KEPT:])), "utf-8")
        temporary.replace(file)
