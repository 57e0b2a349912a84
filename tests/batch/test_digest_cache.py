"""A digest is cached for as long as the file is unchanged."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from ppoctl.core.batch.digest_cache import MOST_KEPT, kept_digest

OLD_NS = 10**18


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ppoctl" / "digests.json"


def old(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return path


def read_bytes_of(path: Path) -> tuple[str, list[tuple[int, int]]]:
    """Return the digest, and the progress that was reported while the file was read; none if it was cached."""
    calls: list[tuple[int, int]] = []
    found = kept_digest(path, lambda _, done, size: calls.append((done, size)))
    assert found.size == path.stat().st_size
    return found.sha256, calls


def test_digest_cache_reads_file_once_and_reports_progress(tmp_path: Path, cache: Path) -> None:
    file, size = tmp_path / "weights", 33 * 2**20
    with file.open("wb") as new:
        new.truncate(size)
    os.utime(file, ns=(OLD_NS, OLD_NS))
    digest = hashlib.sha256(bytes(size)).hexdigest()
    assert read_bytes_of(file) == (digest, [(16 * 2**20, size), (32 * 2**20, size), (size, size)])
    assert read_bytes_of(file) == (digest, [])
    assert cache.is_file()


def test_digest_cache_rereads_changed_file(tmp_path: Path, cache: Path) -> None:
    file = old(tmp_path / "weights", b"first")
    first = read_bytes_of(file)[0]
    old(file, b"other")  # of the same size and time
    assert read_bytes_of(file)[0] == hashlib.sha256(b"other").hexdigest() != first
    old(tmp_path / "new", b"third").replace(file)
    assert read_bytes_of(file)[0] == hashlib.sha256(b"third").hexdigest()
    assert cache.is_file()


def test_digest_cache_skips_recently_written_file(tmp_path: Path, cache: Path) -> None:
    """It may be written again within one tick of the file system's clock."""
    file = tmp_path / "weights"
    file.write_bytes(b"young")
    assert read_bytes_of(file) == read_bytes_of(file)
    assert not cache.exists()


def test_digest_cache_skips_file_written_during_read(tmp_path: Path, cache: Path) -> None:
    file = old(tmp_path / "weights", b"first")
    kept_digest(file, lambda *_: old(file, b"other"))
    assert not cache.exists()
    assert read_bytes_of(file)[0] == hashlib.sha256(b"other").hexdigest()


def test_digest_cache_keeps_newest_entries(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({f"/{number}": {} for number in range(MOST_KEPT)}))
    first, second = tmp_path / "first", tmp_path / "second"
    for file, data in ((first, b"1"), (second, b"2"), (first, b"one")):
        kept_digest(old(file, data))
    kept_digest(second)
    places = list(json.loads(cache.read_text()))
    # The oldest two were dropped. A file that was read again is the newest; a cached one keeps its position.
    assert places == [f"/{number}" for number in range(2, MOST_KEPT)] + [str(second), str(first)]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"%s": {"file": [], "sha256": 3}}'])
def test_damaged_digest_cache_causes_reread(tmp_path: Path, cache: Path, text: str) -> None:
    file = old(tmp_path / "weights", b"x")
    cache.parent.mkdir(parents=True)
    cache.write_text(text.replace("%s", str(file)))
    assert read_bytes_of(file) == (hashlib.sha256(b"x").hexdigest(), [(1, 1)])
    assert read_bytes_of(file)[1] == []


def test_digest_is_computed_without_writable_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = old(tmp_path / "weights", b"x")
    assert kept_digest(file).sha256 == hashlib.sha256(b"x").hexdigest()


def test_digest_of_missing_file_raises(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(FileNotFoundError):
        kept_digest(tmp_path / "none")
    assert not cache.exists()
