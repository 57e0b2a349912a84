"""Keys of other systems and the ppoctl keys that replace them, from the files in `other_systems`.

docs/coming-from.md lists them, and the error for an unknown recipe key uses them. A key matches a row only if the
complete keys are equal; an equal last name is not enough."""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ppoctl.core.key_path import KeyPath
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

ROOT = tree.of(Recipe)
FOLDER = Path(__file__).parent / "other_systems"
ANY = "*"
"""Part of a key that stands for any text; a key that ends in `.*` stands for all keys below a table."""
_FILES = ("nemo_rl", "verl", "trlx", "trl", "openrlhf", "peft", "others")
_ROLE = "ROLE"
ALGORITHMS = ("ppo", "grpo")
"""Algorithms whose defaults are listed."""
OTHERS = "other systems"
"""Name of the `System` whose keys occur in several systems."""
_COMMON = (
    "args base batch cfg class config count default device devices dir enable enabled file format id init key kind "
    "kwargs max method min mode model name names num number options params path rate resources scale server size "
    "split start steps step timeout tokens type types url use value version workers"
)
"""Words in the names of every system: keys that have only such words in common may mean anything."""


@dataclass(frozen=True)
class KeyMapping:
    """One row of the table: a key of another system under each of its names, and the ppoctl keys that replace it."""

    system: str
    theirs: tuple[str, ...]
    """Keys of the other system; if several roles have the key, one name for each role."""
    ours: tuple[tuple[str, ...], ...]
    """ppoctl keys for each of `theirs`, some with the value to write: `ppo.kl.place = "loss"`. Empty: ppoctl has no
    such key."""
    note: str
    values: Mapping[str, str]
    """Value of the other key -> what to write, as TOML: the value of the first ppoctl key, or also other keys with
    their values. Values that are the same in ppoctl are left out."""

    @property
    def ours_of_all(self) -> tuple[str, ...]:
        """ppoctl keys for all of `theirs`, without duplicates."""
        return tuple(dict.fromkeys(name for names in self.ours for name in names))


@dataclass(frozen=True)
class Unused:
    """Keys of another system that have no meaning in ppoctl, with the common reason."""

    keys: tuple[str, ...]
    """Complete keys, or patterns in which `*` stands for any text."""
    why: str


@dataclass(frozen=True)
class PeerDefault:
    """A default of another system that differs from ppoctl's."""

    theirs: str
    """Key of the other system."""
    value: str
    """Its default, in words if it is not one value."""
    ours: tuple[str, ...]
    """Lines of a recipe: `our.key = value`."""
    file: str
    """File of the other system's repository that sets the default."""


@dataclass(frozen=True)
class PeerDefaults:
    """Defaults of one other system that change results, or what an evaluation does."""

    commit: str
    """Commit and date of the repository that they were read from."""
    left_out: str
    """Defaults that a recipe cannot contain for every run, in words."""
    of: Mapping[str, tuple[PeerDefault, ...]]
    """Algorithm (`ppo`, `grpo`) -> its defaults."""


@dataclass(frozen=True)
class System:
    """One other system."""

    name: str
    version: str
    about: str
    prefixes: tuple[str, ...]
    """Prefixes that a user may leave out of a key, such as the prefix of a role."""
    same: dict[str, str]
    """Table -> another table of the system, whose answers the keys of the first have unless it has its own."""
    rows: tuple[KeyMapping, ...]
    unused: tuple[Unused, ...]
    defaults: PeerDefaults | None
    """None: the defaults of the system are not listed."""


@dataclass(frozen=True)
class KeyAnswer:
    """The ppoctl keys that replace one key of another system."""

    system: str
    theirs: str
    """Key of the other system, or the pattern that it matches."""
    ours: tuple[str, ...]
    note: str
    values: Mapping[str, str] = field(default_factory=dict)
    """Value of the other key -> what to write (`KeyMapping.values`)."""

    def message(self, value: object = None) -> str:
        """Return the rest of a sentence about an unknown key that the other system has; `value` is its value."""
        replacement = f"use {self._ours}" if self.ours else "ppoctl has no such key"
        named = self.named(value)
        translated = translation({named: self.values[named]} if named in self.values else self.values)
        text = "; ".join(filter(None, (translated, self.note)))
        return f"it is a key of {self.system}; {replacement}{text and f': {text}'}"

    @staticmethod
    def named(value: object) -> str:
        """Return a value as the files of other systems write it: `true`, `token-mean`."""
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def suggests(self) -> str:
        """The rest of a sentence about an unknown key that resembles a key of the other system."""
        whose = f"{self.system}'s `{self.theirs}`" if self.system != OTHERS else f"`{self.theirs}` of {OTHERS}"
        replacement = f"is {self._ours} in ppoctl" if self.ours else "has no counterpart in ppoctl"
        return f"a suggestion: {whose} {replacement}{self.note and f': {self.note}'}"

    @property
    def _ours(self) -> str:
        return " and ".join(f"`{key}`" for key in self.ours)


@cache
def systems() -> tuple[System, ...]:
    """Return all other systems, in the order of the page."""
    return tuple(_system(tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))) for name in _FILES)


def find(path: KeyPath) -> tuple[KeyAnswer, ...]:
    """Return the answer of each system that has this key.

    The key is first compared as it is written with complete keys and patterns. If no system has it, the key is
    compared with keys without the prefix of their role.
    """
    written = ".".join(path)
    answers = [answer for index in _indices() if (answer := index.answer(written))]
    return tuple(answers or [index.of_role[written] for index in _indices() if written in index.of_role])


def nearest(path: KeyPath) -> KeyAnswer | None:
    """Return the answer to the most similar key of another system, for a key that no system has.

    The most similar key has the most names in common, counted from the last name; among equally similar keys, a key
    that has no further names is preferred. None: no key is similar, or the similar keys have different answers.
    """
    best, nearest_answers = (1, False), list[KeyAnswer]()
    for answer in (answer for index in _indices() for answer in index.whole.values()):
        their = answer.theirs.split(".")
        number = _in_common(path, their)
        closeness = (number, number == len(their))
        if closeness >= best and _is_evidence(path, answer, number):
            nearest_answers, best = [*(nearest_answers if closeness == best else []), answer], closeness
    # If several roles have the key, the user means the role in whose table the key is written.
    of_role = [answer for answer in nearest_answers if any(name.startswith(f"{path[0]}.") for name in answer.ours)]
    meant = (of_role if _is_role(path[0]) else []) or nearest_answers
    return meant[0] if len({answer.ours for answer in meant}) == 1 else None


def _is_evidence(path: KeyPath, answer: KeyAnswer, number: int) -> bool:
    """Return whether the last `number` names that a key has in common with another system's key say what it means.

    Names that everything has (`type`, `enabled`, `model_name`) say nothing, and neither do names of ppoctl's keys:
    `path`, `seed`. In a table that ppoctl does not have, another word of the two keys must be equal too.
    """
    if number == 1 and path[-1] in _our_names():
        return False
    their = answer.theirs.split(".")
    common = set(_COMMON.split())
    around = _words(path[:-number]) & (_words(their[:-number]) | _words(answer.ours))
    is_ours = len(path) == number or path[0] in ROOT.keys
    telling = len(_words(path[-number:]) - common)
    return not around <= common or telling >= 2 or (is_ours and (telling == 1 or number == len(their)))


def _words(names: Iterable[str]) -> set[str]:
    """Return the words of some names: `kl_ctrl`, `ppo.kl` are `kl`, `ctrl` and `ppo`."""
    return {word for name in names for word in re.findall("[a-z0-9]+", name.lower())}


def _is_role(name: str) -> bool:
    """Whether the name is the table of a trained role."""
    return bool(tree.keys_at(ROOT, (name, "optimizer")))


def translation(values: Mapping[str, str]) -> str:
    """Return the values of a key of another system and what they are in ppoctl: `` `kl` is `"k1"` ``."""
    return ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in values.items())


def matches(written: str, pattern: str) -> bool:
    """Whether a pattern matches a key. A pattern that ends in `.*` also matches the table itself."""
    return fnmatchcase(written, pattern) or fnmatchcase(f"{written}.", pattern)


@dataclass(frozen=True)
class _Index:
    """The answers of one system."""

    whole: dict[str, KeyAnswer]
    of_role: dict[str, KeyAnswer]
    """Answers by key without the prefix of a role; a key of several roles has one answer with the ppoctl keys of all
    these roles."""
    patterns: list[KeyAnswer]
    """Answers of rows with `*` in their key, then of the lists of unused keys."""
    same: dict[str, str]
    """Table -> the table whose answers its keys have (`System.same`)."""

    def answer(self, written: str) -> KeyAnswer | None:
        """Return the answer to a complete key; None: the system does not have the key."""
        table, _, rest = written.partition(".")
        found = self.whole.get(written) or self.pattern(written)
        if found is None and table in self.same:
            return self.answer(f"{self.same[table]}.{rest}")
        return found

    def pattern(self, written: str) -> KeyAnswer | None:
        """Return the answer of the first pattern that matches a key; None: no pattern matches."""
        return next((answer for answer in self.patterns if matches(written, answer.theirs)), None)


@cache
def _indices() -> tuple[_Index, ...]:
    return tuple(_index(system) for system in systems())


def _index(system: System) -> _Index:
    index = _Index({}, {}, [], system.same)
    for row in system.rows:
        for their, ours in zip(row.theirs, row.ours, strict=True):
            answer = KeyAnswer(system.name, their, ours, row.note, row.values)
            if ANY in their:
                index.patterns.append(answer)
                continue
            index.whole[their] = answer
            for bare in [their.removeprefix(f"{role}.") for role in system.prefixes if their.startswith(f"{role}.")]:
                others = index.of_role[bare].ours if bare in index.of_role else ()
                index.of_role[bare] = replace(answer, ours=tuple(dict.fromkeys(others + ours)))
    index.patterns.extend(
        KeyAnswer(system.name, key, (), unused.why) for unused in system.unused for key in unused.keys
    )
    return index


def _in_common(path: KeyPath, their: list[str]) -> int:
    pairs = zip(reversed(path), reversed(their), strict=False)
    return next((i for i, (mine, other) in enumerate(pairs) if mine != other), min(len(path), len(their)))


@cache
def _our_names() -> frozenset[str]:
    return frozenset(path[-1] for path, _ in tree.walk(ROOT))


def _system(table: dict[str, Any]) -> System:
    roles: dict[str, str] = table.get("roles", {})
    unused = tuple(
        Unused(tuple(name for key in entry["keys"] for name in _for_roles(key, roles)), entry["why"])
        for entry in table.get("unused", [])
    )
    prefixes = (*roles, *table.get("prefixes", []))
    about = " ".join(table["about"].split())
    rows, same = tuple(_rows(table, roles)), table.get("same", {})
    return System(table["name"], table["version"], about, prefixes, same, rows, unused, _defaults(table))


def _defaults(table: dict[str, Any]) -> PeerDefaults | None:
    if (found := table.get("defaults")) is None:
        return None
    of = {
        algorithm: tuple(
            PeerDefault(theirs, entry["value"], tuple(entry["is"]), entry["file"])
            for entries in (found["both"], found.get(algorithm, {}))
            for theirs, entry in entries.items()
        )
        for algorithm in ALGORITHMS
    }
    return PeerDefaults(found["commit"], found["left_out"], of)


def _rows(table: dict[str, Any], roles: dict[str, str]) -> Iterator[KeyMapping]:
    for key, row in table["keys"].items():
        ours = [name for name in row.get("is", "").split(", ") if name]
        # `ROLE` is replaced by the name of each role, in their key and in ours; a key without `ROLE` is not changed.
        by_role = tuple(tuple(name.replace(_ROLE, role) for name in ours) for role in _roles_of(key, roles).values())
        names = tuple(_for_roles(key, roles))
        yield KeyMapping(table["name"], names, by_role, row.get("note", ""), row.get("values", {}))


def _for_roles(key: str, roles: dict[str, str]) -> list[str]:
    return [key.replace(_ROLE, role) for role in _roles_of(key, roles)]


def _roles_of(key: str, roles: dict[str, str]) -> dict[str, str]:
    return roles if _ROLE in key else {"": ""}
