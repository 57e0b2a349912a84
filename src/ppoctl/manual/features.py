"""The algorithm in parts, in the order of what happens to a token: each a table of the recipe, one of several
alternatives, or a key that is a part by itself, with its formula, its source and its keys.

docs/algorithms.md, `ppoctl recipes keys` and `ppoctl recipes metrics` tell what is here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from inspect import get_annotations

from pydantic import BaseModel

from ppoctl.manual.keys import REQUIRED, KeyLine, key_line
from ppoctl.metric_registry import find
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.docstring_fields import DocstringFields, parse_docstring
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe_table import RESULTS


@dataclass(frozen=True)
class Section:
    """What happens at one place of a step, and the keys that say how."""

    title: str
    decides: str
    """What a person decides there, in a few words."""
    keys: tuple[str, ...]
    """Dotted keys; the parts at or below them stand here, in this order, unless another section names them closer."""


SECTIONS = (
    Section("What is drawn", "the model; how many responses, how long, how random", ("model", "rollout")),
    Section(
        "What a response earns",
        "the reward, and what is done with it before it counts",
        (
            "reward", "reward.scale", "reward.clip", "reward.moments", "reward.unfinished_factor", "reward.overlong",
            "reward.length_penalty",
        ),
    ),
    Section(
        "How far it may go from the reference",
        "the penalty of moving away from the model that training began with",
        ("ppo.kl",),
    ),
    Section(
        "Advantages",
        "how a reward is spread over tokens, and what a response counts that was cut off",
        ("ppo.advantages", "ppo.truncated"),
    ),
    Section(
        "Where sampler and trainer differ",
        "whose log-probs count, and which tokens or responses are left out",
        ("ppo.old_logprobs", "ppo.rollout_correction", "ppo.rollout_rejection", "ppo.max_sequence_gap"),
    ),
    Section("The actor's loss", "which token moves how far", ("ppo.policy_loss",)),
    Section("The critic's loss", "what the critic learns to expect", ("ppo.value_loss",)),
    Section(
        "Order and schedules",
        "epochs and minibatches, optimizers, how long it runs, which states are kept",
        (
            "ppo", "actor.optimizer", "critic.optimizer", "steps", "epochs",
            "checkpoint.keep_last", "checkpoint.best", "checkpoint.best_keep", "checkpoint.best_direction",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class FeatureKey:
    """One key of a part, under the names it has: a table of actor and critic is told once."""

    names: tuple[str, ...]
    line: KeyLine
    docstring: DocstringFields
    """The docstring of the key; of a part that is one key, all of it is said there already."""


_TOLD_ELSEWHERE: tuple[KeyPath, ...] = (("reward", "otherwise"),)
"""Tables that may be whatever another one may be."""


@dataclass(frozen=True)
class Feature:
    """One part of the algorithm."""

    section: Section
    names: tuple[str, ...]
    """What a person writes to have it: a table, an alternative (`ppo.kl.place = "loss"`), or a key."""
    is_default: bool
    """Whether it is the alternative that a recipe has which writes none."""
    docstring: DocstringFields
    keys: tuple[FeatureKey, ...]

    @property
    def is_one_key(self) -> bool:
        """Whether the part is a key by itself."""
        return len(self.keys) == 1 and self.keys[0].names == self.names

    def owns(self, prefix: str) -> bool:
        """Whether the part or one of its keys is at or below a dotted key."""
        written = [name.split(" ")[0] for name in self.names]
        return any(
            f"{name}.".startswith(f"{prefix}.") for name in (*written, *(n for k in self.keys for n in k.names))
        )

    def shows_in(self, metric: str) -> bool:
        """Whether the docstring of the part, or of one of its keys, names the metric."""
        known = find(metric)
        figures = (*self.docstring.metrics, *(name for key in self.keys for name in key.docstring.metrics))
        return known is not None and known in map(find, figures)


@dataclass
class _Part:
    """A part while it is gathered from all places where the schema has it."""

    section: Section
    rank: int
    docstring: str
    is_key: bool = False
    """Whether it is a key by itself, which stands behind the tables beside it."""
    is_default: bool = False
    names: dict[str, None] = field(default_factory=dict)
    keys: dict[str, list[FeatureKey]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """A table where the schema has it; `alternative` says what is written for it, if it is one of several."""

    path: KeyPath
    table: tree.TableNode
    alternative: str
    is_default: bool


def features() -> list[Feature]:
    """Every part of the algorithm, section by section, in the order of the schema within."""
    parts: dict[object, _Part] = {}
    root = tree.of(Recipe)
    for place in (_Place((), root, "", is_default=False), *_places(root, ())):
        for name, key in place.table.keys.items():
            path = (*place.path, name)
            named, section, rank = _where(dotted(path))
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


def _places(here: tree.TableNode, path: KeyPath) -> Iterator[_Place]:
    """Every table below a path, each alternative by itself; not those whose names a person chooses."""
    for name, key in here.keys.items():
        inner = (*path, name)
        if inner in _TOLD_ELSEWHERE:
            continue
        if isinstance(key.node, tree.TableNode):
            yield _Place(inner, key.node, "", is_default=False)
            yield from _places(key.node, inner)
        elif isinstance(key.node, tree.Choice):
            for alternative, table in key.node.tables.items():
                written = _written(key.node, alternative, inner)
                yield _Place(inner, table, written, isinstance(key.default, table.model))
                yield from _places(table, inner)


def _written(choice: tree.Choice, alternative: str, path: KeyPath) -> str:
    """What a person writes for an alternative: the key that names it, or else a key that no other has."""
    keys = choice.tables[alternative].keys
    others = {name for other, table in choice.tables.items() if other != alternative for name in table.keys}
    for name, key in keys.items():
        if tree.allowed(key.field.annotation) == (alternative,):
            return f'{dotted((*path, name))} = "{alternative}"'
    return f"{dotted(path)} by {next(name for name in keys if name not in others)}"


def _add(parts: dict[object, _Part], place: _Place, path: KeyPath, new: _Part, *, is_own: bool) -> None:
    """Put a key into the part it belongs to, which is `new` where there is none yet. A key with a formula of its own
    is a part by itself, and so is one that a section names."""
    key = place.table.keys[path[-1]]
    told, owner = key.marked, _owner(place.table.model, key.attribute)
    if told.formula or is_own:
        part = parts.setdefault(
            (owner, key.attribute), replace(new, docstring=key.field.description or "", is_key=True)
        )
        part.names[dotted(path)] = None
        told = parse_docstring("")
    else:
        part = parts.setdefault(owner, replace(new, docstring=owner.__doc__ or ""))
        is_whole = owner is _declared(place.table.model)
        part.names[place.alternative if is_whole and place.alternative else dotted(place.path)] = None
        part.is_default |= is_whole and place.is_default
        if place.alternative.startswith(f"{dotted(path)} = "):
            return  # the name of the alternative says it
    line = key_line(path, key, REQUIRED if key.required else key.default)
    part.keys.setdefault(path[-1], []).append(FeatureKey((dotted(path),), line, told))


def _merged(keys: list[FeatureKey]) -> FeatureKey:
    return FeatureKey(
        tuple(dict.fromkeys(name for key in keys for name in key.names)), keys[0].line, keys[0].docstring
    )


def _owner(model: type[BaseModel], attribute: str) -> type:
    """The class that declares a key: alternatives have the keys that all of them share from one."""
    return next(each for each in model.__mro__ if attribute in get_annotations(each))


def _declared(model: type[BaseModel]) -> type:
    """The class in which a table is written: those that only join others have no keys of their own."""
    return next(each for each in model.__mro__ if get_annotations(each))


def _where(path: str) -> tuple[str, Section | None, int]:
    """The closest dotted key of a section that a path is at or below, its section, and its place there."""
    found = [
        (key, section, rank)
        for section in SECTIONS
        for rank, key in enumerate(section.keys)
        if f"{path}.".startswith(f"{key}.")
    ]
    return max(found, key=lambda one: len(one[0]), default=("", None, 0))
