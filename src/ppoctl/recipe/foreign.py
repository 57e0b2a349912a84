"""Keys of other systems and what they are here, from `foreign.toml`: for docs/coming-from.md, and for the answer to
a key that somebody brought along."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe

ROOT = tree.of(Recipe)
BELOW = ".*"
"""The end of a key that stands for all keys below it."""
_ROLE = "ROLE"
OTHERS = "other systems"
"""The name of the table with what no one system has alone."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a key of another system under each name it has, and what it is here."""

    system: str
    theirs: tuple[str, ...]
    """Their key; where several roles have it, one for each."""
    ours: tuple[tuple[str, ...], ...]
    """Keys of ours for each of `theirs`, some with the value to write: `ppo.kl.place = "loss"`. None: nothing is like
    it here."""
    note: str

    @property
    def ours_of_all(self) -> tuple[str, ...]:
        """Keys of ours for all of `theirs`, each once."""
        return tuple(dict.fromkeys(name for names in self.ours for name in names))


@dataclass(frozen=True)
class System:
    """One other system."""

    name: str
    version: str
    about: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Answer:
    """What one key of another system is here."""

    system: str
    ours: tuple[str, ...]
    note: str
    names: int
    """How many names it has in common with the key that was asked about, from the last."""

    @property
    def says(self) -> str:
        """The rest of a sentence about an unknown key."""
        whose = f"{self.system}'s" if self.system != OTHERS else f"of {OTHERS}"
        here = " and ".join(f"`{key}`" for key in self.ours) or "nothing"
        return f"it is {whose}, and {here} here" + (f": {self.note}" if self.note else "")


@cache
def systems() -> tuple[System, ...]:
    """All other systems, in the order of the file."""
    tables = tomllib.loads((Path(__file__).parent / "foreign.toml").read_text("utf-8"))["system"]
    return tuple(
        System(table["name"], table["version"], " ".join(table["about"].split()), tuple(_rows(table)))
        for table in tables
    )


def find(path: KeyPath) -> Answer | None:
    """The answer to a key that is not ours: the row with the most names, from the last, in common with it."""
    written, best, found = ".".join(path), (0, False), None
    for row in (row for system in systems() for row in system.rows):
        for their, ours in zip(row.theirs, row.ours, strict=True):
            closeness = _closeness(written, their)
            if closeness > best:
                # Where both roles have it, the one in whose table it was written is meant.
                meant = tuple(name for name in ours if name.split(".")[0] == path[0]) or ours
                best, found = closeness, Answer(row.system, meant, row.note, closeness[0])
    return found


def _closeness(written: str, their: str) -> tuple[int, bool]:
    """How many names two keys have in common, from the last; and whether that is all of one of them."""
    if their.endswith(BELOW):
        above = their.removesuffix(BELOW)
        return (above.count(".") + 1, False) if f"{written}.".startswith(f"{above}.") else (0, False)
    mine, other = written.split(".")[::-1], their.split(".")[::-1]
    common = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), None)
    number = min(len(mine), len(other)) if common is None else common
    # A name that keys of ours have too says nothing by itself: `path`, `seed`, `temperature`.
    if number == 1 < max(len(mine), len(other)) and mine[0] in _our_names():
        return 0, False
    return number, number == len(other)


@cache
def _our_names() -> frozenset[str]:
    return frozenset(path[-1] for path, _ in tree.walk(ROOT))


def _rows(table: dict[str, Any]) -> Iterator[Row]:
    for key, row in table["keys"].items():
        ours = [name for name in row.get("is", "").split(", ") if name]
        # For each role its name there and here; a key that no role has is told as it is.
        roles: dict[str, str] = table["roles"] if _ROLE in key else {"": ""}
        here = tuple(tuple(name.replace(_ROLE, role) for name in ours) for role in roles.values())
        yield Row(table["name"], tuple(key.replace(_ROLE, role) for role in roles), here, row.get("note", ""))
