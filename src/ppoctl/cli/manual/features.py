"""Entries of the algorithm documentation, in the order of processing.

An entry is a table of the recipe, one of several alternative tables, or a single key, with its formula, its source
and its keys. `ppoctl recipes keys`, `ppoctl recipes metrics` and docs/algorithms.md print the entries.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from inspect import get_annotations

from pydantic import BaseModel

from ppoctl.cli.manual.keys import REQUIRED, KeyLine, key_line
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.metric_registry import find
from ppoctl.core.recipe_table import RESULTS
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.docstring_fields import DocstringFields, parse_docstring
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Section:
    """One section of the page: a part of a step, and the keys that configure it."""

    title: str
    decides: str
    """The decision of the user in this section, in a few words."""
    keys: tuple[str, ...]
    """Dotted keys. The section contains the entries at or below these keys, in this order, except entries for which
    another section names a longer part of their path."""


SECTIONS = (
    Section("Generation", "model; number, length and randomness of responses", ("model", "rollout")),
    Section(
        "Reward",
        "reward of a response, and its shaping",
        (
            "reward", "reward.scale", "reward.clip", "reward.moments", "reward.unfinished_factor", "reward.overlong",
            "reward.length_penalty",
        ),
    ),
    Section(
        "KL penalty",
        "penalty for moving away from the initial model, or from another model",
        ("ppo.kl", "model.reference"),
    ),
    Section(
        "Advantages",
        "distribution of the reward over tokens; treatment of truncated responses; rows of the updates",
        ("ppo.whiten_rewards", "ppo.advantages", "ppo.truncated", "ppo.resample"),
    ),
    Section(
        "Sampler and trainer",
        "log-probs of the old policy; weights and rejection if sampler and trainer differ",
        ("ppo.old_logprobs", "ppo.rollout_correction", "ppo.rollout_rejection", "ppo.max_sequence_gap"),
    ),
    Section("Actor loss", "policy loss and its clipping", ("ppo.policy_loss",)),
    Section("Critic loss", "value loss and its clipping", ("ppo.value_loss",)),
    Section(
        "Order and schedules",
        "epochs and minibatches, optimizers, length of the run, states to keep",
        (
            "ppo", "actor.optimizer", "critic.optimizer", "steps", "epochs",
            "checkpoint.keep_last", "checkpoint.best", "checkpoint.best_keep", "checkpoint.best_direction",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FeatureKey:
    """One key of an entry, with all names of the key: a table that both actor and critic have is one entry."""

    names: tuple[str, ...]
    line: KeyLine
    docstring: DocstringFields
    """The docstring of the key; empty if the entry is a single key, because the entry then has this docstring."""


_COPIES: tuple[KeyPath, ...] = (("reward", "otherwise"),)
"""Tables that are skipped because another table has the same alternatives."""


@dataclass(frozen=True)
class Feature:
    """One entry of the algorithm documentation."""

    section: Section
    names: tuple[str, ...]
    """Names in a recipe: a table, an alternative (`ppo.kl.place = "loss"`), or a key."""
    is_default: bool
    """Whether the entry is the default alternative of a recipe."""
    docstring: DocstringFields
    keys: tuple[FeatureKey, ...]

    @property
    def is_one_key(self) -> bool:
        """Whether the entry is a single key."""
        return len(self.keys) == 1 and self.keys[0].names == self.names

    def owns(self, prefix: str) -> bool:
        """Whether the entry or one of its keys is at or below a dotted key."""
        written = [name.split(" ")[0] for name in self.names]
        return any(
            f"{name}.".startswith(f"{prefix}.") for name in (*written, *(n for k in self.keys for n in k.names))
        )

    def shows_in(self, metric: str) -> bool:
        """Whether the docstring of the entry, or of one of its keys, names the metric."""
        known = find(metric)
        metrics = (*self.docstring.metrics, *(name for key in self.keys for name in key.docstring.metrics))
        return known is not None and known in map(find, metrics)


@dataclass
class _Part:
    """An entry that is collected from all of its occurrences in the schema."""

    section: Section
    rank: int
    docstring: str
    is_key: bool = False
    """Whether the entry is a single key; such entries come after the tables of the same rank."""
    is_default: bool = False
    names: dict[str, None] = field(default_factory=dict)
    keys: dict[str, list[FeatureKey]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """One occurrence of a table in the schema. If the table is one of several alternatives, `alternative` is the text
    that selects it in a recipe; otherwise it is empty."""

    path: KeyPath
    table: tree.TableNode
    alternative: str
    is_default: bool


def features() -> list[Feature]:
    """Return every entry of the algorithm documentation, by section and, within a section, in schema order."""
    parts: dict[object, _Part] = {}
    root = tree.of(Recipe)
    for place in (_Place((), root, "", is_default=False), *_places(root, ())):
        for name, key in place.table.keys.items():
            path = (*place.path, name)
            named, section, rank = _section_of(dotted(path))
            if isinstance(key.node, tree.Leaf) and section and (key.effect is RESULTS or named == dotted(path)):
                _add(parts, place, path, _Part(section, rank, ""), is_own=named == dotted(path))
    ordered = sorted(parts.values(), key=lambda part: (SECTIONS.index(part.section), part.rank, part.is_key))
    return [
        Feature(
            part.section,
            tuple(part.names),
            part.is_default,
            parse_docstring(part.docstring),
            tuple(_merged(keys) for keys in part.keys.values()),
        )
        for part in ordered
    ]


def _places(table: tree.TableNode, path: KeyPath) -> Iterator[_Place]:
    """Yield every table below a path and every alternative, except tables whose names the user chooses."""
    for name, key in table.keys.items():
        inner = (*path, name)
        if inner in _COPIES:
            continue
        if isinstance(key.node, tree.TableNode):
            yield _Place(inner, key.node, "", is_default=False)
            yield from _places(key.node, inner)
        elif isinstance(key.node, tree.Choice):
            for alternative, chosen in key.node.tables.items():
                written = _written(key.node, alternative, inner)
                yield _Place(inner, chosen, written, isinstance(key.default, chosen.model))
                yield from _places(chosen, inner)


def _written(choice: tree.Choice, alternative: str, path: KeyPath) -> str:
    """Return how a recipe selects an alternative: by the key that names the alternative, or else by a key that no
    other alternative has."""
    keys = choice.tables[alternative].keys
    others = {name for other, table in choice.tables.items() if other != alternative for name in table.keys}
    for name, key in keys.items():
        if tree.allowed(key.field.annotation) == (alternative,):
            return f'{dotted((*path, name))} = "{alternative}"'
    return f"{dotted(path)} by {next(name for name in keys if name not in others)}"


def _add(parts: dict[object, _Part], place: _Place, path: KeyPath, new: _Part, *, is_own: bool) -> None:
    """Add a key to its entry, which is `new` if the entry does not exist yet.

    A key with its own formula, or a key that a section names, is a separate entry.
    """
    key = place.table.keys[path[-1]]
    docstring, owner = key.marked, _owner(place.table.model, key.attribute)
    if docstring.formula or is_own:
        part = parts.setdefault(
            (owner, key.attribute), replace(new, docstring=key.field.description or "", is_key=True)
        )
        part.names[dotted(path)] = None
        docstring = parse_docstring("")
    else:
        part = parts.setdefault(owner, replace(new, docstring=owner.__doc__ or ""))
        is_complete = owner is _declared(place.table.model)
        part.names[place.alternative if is_complete and place.alternative else dotted(place.path)] = None
        part.is_default |= is_complete and place.is_default
        if place.alternative.startswith(f"{dotted(path)} = "):
            return  # the name of the entry already contains this key
    line = key_line(path, key, REQUIRED if key.required else key.default)
    part.keys.setdefault(path[-1], []).append(FeatureKey((dotted(path),), line, docstring))


def _merged(keys: list[FeatureKey]) -> FeatureKey:
    return FeatureKey(
        tuple(dict.fromkeys(name for key in keys for name in key.names)), keys[0].line, keys[0].docstring
    )


def _owner(model: type[BaseModel], attribute: str) -> type:
    """Return the class that declares a key; alternatives inherit the keys that they share from a common base."""
    return next(base for base in model.__mro__ if attribute in get_annotations(base))


def _declared(model: type[BaseModel]) -> type:
    """Return the class that declares the keys of a table; a class that only combines other classes does not declare
    any."""
    return next(base for base in model.__mro__ if get_annotations(base))


def _section_of(path: str) -> tuple[str, Section | None, int]:
    """Return the longest section key that a path is at or below, the section of this key, and the position of the key
    in the section."""
    candidates = [
        (key, section, rank)
        for section in SECTIONS
        for rank, key in enumerate(section.keys)
        if f"{path}.".startswith(f"{key}.")
    ]
    return max(candidates, key=lambda candidate: len(candidate[0]), default=("", None, 0))
