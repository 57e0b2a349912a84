"""The damage that `soak.py` does to a run directory: one change, to one file or folder, chosen by a seed."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WEIGHT_AT_THE_TOP = 4
KINDS = ("flip", "cut", "swap", "delete", "mode")


@dataclass
class Damage:
    """A description of the damage. `undo` restores the originals, as a user with a copy of the run does. `lost`: the
    lines of ledger and journal that were damaged, from 0, by the name of the file."""

    kind: str
    what: str
    undo: Callable[[], None]
    lost: dict[str, set[int]] = field(default_factory=dict)


def hurt(root: Path, original: Path, rng: random.Random) -> Damage:
    """Damage this copy of `original`. Every kind of file is equally likely, however many files it has; the top-level
    files, such as journal and ledger, are more likely."""
    kind = rng.choice(KINDS)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    folders = sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())
    among = [*files, *folders] if kind in ("delete", "mode") else [path for path in files if path.stat().st_size]
    by_kind: dict[str, list[Path]] = {}
    for path in among:
        by_kind.setdefault(_kind_of(root, path), []).append(path)
    if kind == "swap":
        by_kind = {name: paths for name, paths in by_kind.items() if _differ(paths)}
    names = sorted(by_kind)
    name = rng.choices(names, [WEIGHT_AT_THE_TOP if "/" not in each and "." in each else 1 for each in names])[0]
    path = rng.choice(by_kind[name])
    if kind == "swap":
        return _swap(root, original, path, rng.choice([each for each in by_kind[name] if _differ([path, each])]))
    what, lost = f"{kind} {path.relative_to(root)}", _lines(path)
    if kind == "flip":
        at, lost = _flip(path, rng)
        what += at
    elif kind == "cut":
        keep = rng.randrange(path.stat().st_size)
        lost = {number for number in lost if number >= path.read_bytes()[:keep].count(b"\n")}
        os.truncate(path, keep)
        what += f" to {keep} bytes"
    elif kind == "delete":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        mode = path.stat().st_mode
        path.chmod(0)
        return Damage(kind, what, lambda: path.chmod(mode))
    return Damage(kind, what, lambda: _put_back(root, original, path), {path.name: lost} if lost else {})


def changed(root: Path, original: Path) -> dict[Path, bytes | None]:
    """Return files of the original whose content differs in this copy; None: they are missing."""
    pairs = ((root / source.relative_to(original), source) for source in original.rglob("*") if source.is_file())
    found = (
        (path, source, _content(path)) for path, source in pairs if os.access(path, os.R_OK) or not path.exists()
    )
    return {path: data for path, source, data in found if source.read_bytes() != data}


def put_back(root: Path, original: Path, hurt: dict[Path, bytes | None]) -> bool:
    """Restore the originals of files that are still damaged; return whether there were any. Missing folders were
    removed regularly, except evaluations, which are never removed."""
    stays = {path for path in hurt if path.parent.is_dir() or path.parent.name.endswith("-eval")}
    left = [path for path in stays if _content(path) == hurt[path]]
    for path in left:
        # A folder without a manifest is swept, with all its content.
        _put_back(root, original, path.parent if path.parent.name.endswith("-eval") else path)
    return bool(left)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _kind_of(root: Path, path: Path) -> str:
    """Return the name without numbers: states/actor/N/common.pt and states/critic/N/common.pt are two kinds."""
    words = [word for word in path.relative_to(root).parts if not word.isdigit()]
    return "/".join(words)


def _differ(paths: list[Path]) -> bool:
    return len({path.read_bytes() for path in paths}) > 1


def _lines(path: Path) -> set[int]:
    is_lines = path.name in ("ledger.jsonl", "journal.jsonl")
    return set(range(len(path.read_bytes().splitlines()))) if is_lines and path.is_file() else set()


def _flip(path: Path, rng: random.Random) -> tuple[str, set[int]]:
    data = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    line = bytes(data[:at]).count(b"\n")
    # A damaged line end joins the line with the next.
    touched = {line, line + 1} if data[at] == ord("\n") else {line}
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f" at byte {at}, bit {bit} (line {line + 1})", touched & _lines(path)


def _swap(root: Path, original: Path, one: Path, other: Path) -> Damage:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)

    def undo() -> None:
        for path in (one, other):
            _put_back(root, original, path)

    return Damage("swap", f"swap {one.relative_to(root)} and {other.relative_to(root)}", undo)


def _put_back(root: Path, original: Path, path: Path) -> None:
    source = original / path.relative_to(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, path, dirs_exist_ok=True)
    else:
        shutil.copy2(source, path)
