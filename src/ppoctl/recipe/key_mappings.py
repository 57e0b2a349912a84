"""Keys of other systems and what they are here, from the files of `other_systems`: for docs/coming-from.md, and for
the answer to an unknown key of a recipe. A key is answered by the row of the whole key, never by that of another."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe

ROOT = tree.of(Recipe)
FOLDER = Path(__file__).parent / "other_systems"
BELOW = ".*"
"""The end of a key that stands for all keys below it."""
_FILES = ("nemo_rl", "verl", "trlx", "trl", "openrlhf", "others")
_ROLE = "ROLE"
OTHERS = "other systems"
"""The name of the table with what no one system has alone."""


@dataclass(frozen=True)
class KeyMapping:
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
class Unused:
    """Keys of another system that have no meaning here, for one reason."""

    keys: tuple[str, ...]
    """Whole keys, or patterns in which `*` stands for any text."""
    why: str


@dataclass(frozen=True)
class System:
    """One other system."""

    name: str
    version: str
    about: str
    prefixes: tuple[str, ...]
    """Beginnings of keys that may be left out: those of roles."""
    rows: tuple[KeyMapping, ...]
    unused: tuple[Unused, ...]


@dataclass(frozen=True)
class KeyAnswer:
    """What one key of another system is here."""

    system: str
    theirs: str
    """Their key, or the pattern that it matches."""
    ours: tuple[str, ...]
    note: str

    @property
    def message(self) -> str:
        """The rest of a sentence about an unknown key that is theirs."""
        whose = f"{self.system}'s" if self.system != OTHERS else f"of {OTHERS}"
        return f"it is {whose}, and {self._here}"

    @property
    def suggests(self) -> str:
        """The rest of a sentence about an unknown key that is not theirs, but near to it."""
        whose = f"{self.system}'s `{self.theirs}`" if self.system != OTHERS else f"`{self.theirs}` of {OTHERS}"
        return f"a suggestion: {whose} is {self._here}"

    @property
    def _here(self) -> str:
        return (
            (" and ".join(f"`{key}`" for key in self.ours) or "nothing") + " here" + (self.note and f": {self.note}")
        )


@cache
def systems() -> tuple[System, ...]:
    """All other systems, in the order of the page."""
    return tuple(_system(tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))) for name in _FILES)


def find(path: KeyPath) -> tuple[KeyAnswer, ...]:
    """The answer of each system that has a key that is not ours: as it is written, by a row or a pattern; where none
    has it so, without the prefix of a role."""
    written = ".".join(path)
    found = [answer for index in _indices() if (answer := index.whole.get(written) or index.pattern(written))]
    return tuple(found or [index.of_role[written] for index in _indices() if written in index.of_role])


def nearest(path: KeyPath) -> KeyAnswer | None:
    """The answer to the key with the most names, from the last, in common with a key that no system has, and of these
    one that has no other names; None where there is none, or such keys have several answers."""
    best, found = (1, False), list[KeyAnswer]()
    for answer in (answer for index in _indices() for answer in index.whole.values()):
        their = answer.theirs.split(".")
        number = _in_common(path, their)
        closeness = (number, number == len(their))
        # A name that keys of ours have too says nothing by itself: `path`, `seed`, `temperature`.
        if closeness >= best and (number > 1 or path[-1] not in _our_names()):
            found, best = [*(found if closeness == best else []), answer], closeness
    # Where both roles have it, the one in whose table it was written is meant.
    of_role = [answer for answer in found if any(name.startswith(f"{path[0]}.") for name in answer.ours)]
    meant = (of_role if path[0] in ("actor", "critic") else []) or found
    return meant[0] if len({answer.ours for answer in meant}) == 1 else None


def matches(written: str, pattern: str) -> bool:
    """Whether a pattern stands for a key. One that ends in `.*` stands for the table itself too."""
    return fnmatchcase(written, pattern) or fnmatchcase(f"{written}.", pattern)


@dataclass(frozen=True)
class _Index:
    """The answers of one system."""

    whole: dict[str, KeyAnswer]
    of_role: dict[str, KeyAnswer]
    """Keys without the prefix of a role; what several roles have is one answer with the keys of all."""
    patterns: list[KeyAnswer]
    """Those of rows for all keys below one, then those of the lists of what has no meaning here."""

    def pattern(self, written: str) -> KeyAnswer | None:
        """The answer of the first pattern that stands for a key."""
        return next((answer for answer in self.patterns if matches(written, answer.theirs)), None)


@cache
def _indices() -> tuple[_Index, ...]:
    return tuple(_index(system) for system in systems())


def _index(system: System) -> _Index:
    found = _Index({}, {}, [])
    for row in system.rows:
        for their, ours in zip(row.theirs, row.ours, strict=True):
            answer = KeyAnswer(system.name, their, ours, row.note)
            if their.endswith(BELOW):
                found.patterns.append(answer)
                continue
            found.whole[their] = answer
            for bare in [their.removeprefix(f"{role}.") for role in system.prefixes if their.startswith(f"{role}.")]:
                others = found.of_role[bare].ours if bare in found.of_role else ()
                found.of_role[bare] = replace(answer, ours=tuple(dict.fromkeys(others + ours)))
    found.patterns.extend(
        KeyAnswer(system.name, key, (), unused.why) for unused in system.unused for key in unused.keys
    )
    return found


def _in_common(path: KeyPath, their: list[str]) -> int:
    pairs = zip(reversed(path), reversed(their), strict=False)
    return next((i for i, (mine, other) in enumerate(pairs) if mine != other), min(len(path), len(their)))


@cache
def _our_names() -> frozenset[str]:
    return frozenset(path[-1] for path, _ in tree.walk(ROOT))


def _system(table: dict[str, Any]) -> System:
    roles: dict[str, str] = table.get("roles", {})
    unused = tuple(
        Unused(tuple(name for key in each["keys"] for name in _for_roles(key, roles)), each["why"])
        for each in table.get("unused", [])
    )
    prefixes = (*roles, *table.get("prefixes", []))
    about = " ".join(table["about"].split())
    return System(table["name"], table["version"], about, prefixes, tuple(_rows(table, roles)), unused)


def _rows(table: dict[str, Any], roles: dict[str, str]) -> Iterator[KeyMapping]:
    for key, row in table["keys"].items():
        ours = [name for name in row.get("is", "").split(", ") if name]
        # For each role its name there and here; a key that no role has is told as it is.
        here = tuple(tuple(name.replace(_ROLE, role) for name in ours) for role in _roles_of(key, roles).values())
        yield KeyMapping(table["name"], tuple(_for_roles(key, roles)), here, row.get("note", ""))


def _for_roles(key: str, roles: dict[str, str]) -> list[str]:
    return [key.replace(_ROLE, role) for role in _roles_of(key, roles)]


def _roles_of(key: str, roles: dict[str, str]) -> dict[str, str]:
    return roles if _ROLE in key else {"": ""}
