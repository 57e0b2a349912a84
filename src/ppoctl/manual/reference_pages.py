"""The two reference pages of docs/, made of the schema and of the registry of metrics: `make docs` writes them, a
test holds them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ppoctl.manual.algorithm_pages import cells, coded
from ppoctl.manual.guides import Guide, groups, guide
from ppoctl.manual.keys import REQUIRED, KeyLine, key_lines
from ppoctl.metric_registry import METRICS, Metric
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

METRICS_HEAD = """# Metrics

Every figure that a run reports. On a terminal: `ppoctl recipes metrics NAME` prints what stands here of one metric,
`ppoctl recipes metrics policy` of a group. Curves as a whole, and what to change when a run does not learn:
[reading curves](reading-curves.md). `[expect]`, `checkpoint.best` and `[health]` of a recipe judge by these names.

A metric with a link in its name is one to steer by: below its table stands how to read it, and what to do.

`make docs` makes this page of `src/ppoctl/metric_registry.py` and `src/ppoctl/manual/guides.toml`.
"""

RECIPE_HEAD = """# Every key of a recipe

A recipe is a TOML file, or several of which a later one overrides an earlier one. An unknown key is an error, and so
is a value of another type (`"8"` is no number). What is left out has the default that stands here; `required` has
none. An [annotated recipe](annotated.toml) shows the usual keys at work; formulas, sources and whose defaults these
are: [algorithms](algorithms.md). On a terminal: `ppoctl recipes keys TABLE`, or a word: `ppoctl recipes keys lr`.

Tables of several files are merged key by key, but for two: a layout (`parallel`) says all there is to say, and a
table whose kind changes (`kind`, `place`, `format`) begins anew. `--set KEY=VALUE`, like a variable
(`PPOCTL_PPO__EPOCHS`), is stronger than all files, and gives one key another value. Where that value is a table it
takes the place of the whole table, and what it leaves out has its default: `--set expect={}` expects nothing,
`--set 'actor.parallel={pipeline=2}'` is two processes whatever the file says, and `--set actor.parallel.pipeline=2`
changes that one key of the layout.

`changes` says what another value of the key changes. **results**: what is learned, so that a run in progress takes it
only from its next step on. **speed**: time and memory, and no result but for rounding. **reporting**: what is
told, kept or asked for. A name in place of which `*` stands is yours to choose.

`make docs` makes this page of the docstrings in `src/ppoctl/recipe` and `src/ppoctl/rewards`.
"""


def metrics() -> str:
    """The page docs/metrics.md."""
    lines = [METRICS_HEAD, *(f"- [{name}](#{name}): {says}" for name, says in groups().items())]
    for group, says in groups().items():
        inside = [metric for metric in METRICS if metric.name.startswith(f"{group}/")]
        lines += ["", f"## {group}", "", says, "", "| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        lines += [cells(_linked(metric), metric.unit, metric.description, metric.healthy) for metric in inside]
        for metric in inside:
            if found := guide(metric):
                lines += ["", f"### `{metric.name}`", "", *metric_lines(metric, found, "- ")]
    return "\n".join(lines) + "\n"


def metric_lines(metric: Metric, found: Guide, mark: str = "") -> list[str]:
    """The lines about a metric that a person steers by: how to read it, what is healthy, and what to do when."""
    healthy = f" Healthy: {metric.healthy}." if metric.healthy else ""
    return [found.read + healthy, "", *(f"{mark}**{sees}**: {do}." for sees, do in found.when)]


def _linked(metric: Metric) -> str:
    anchor = "".join(char for char in metric.name if char.isalnum() or char in "_-")
    return f"[`{metric.name}`](#{anchor})" if guide(metric) else f"`{metric.name}`"


@dataclass(frozen=True)
class _Group:
    """A table of the recipe under each name it has there, and the keys in it."""

    lines: Mapping[str, list[KeyLine]]
    """Its lines by the dotted name of the table; the same ones but for their defaults."""

    @property
    def first(self) -> str:
        return next(iter(self.lines))


def recipe() -> str:
    """The page docs/recipe.md."""
    parts: dict[str, list[str]] = {}
    shown: set[str] = set()
    title = TOP
    for group in _groups():
        new = [top for top in dict.fromkeys(name.split(".")[0] for name in group.lines) if top and top not in shown]
        shown.update(new)
        title = " and ".join(new) or title
        is_top = group.first in (title.split(" and ")[0], "")
        parts.setdefault(title, []).extend(["", *filter(None, _part(group, is_top=is_top))])
    contents = ", ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in parts)
    lines = [line for title, part in parts.items() for line in ("", f"## {title}", *part)]
    return "\n".join([RECIPE_HEAD, contents, *lines]) + "\n"


TOP = "The top of the file"


def _part(group: _Group, *, is_top: bool) -> Iterator[str]:
    names, lines = list(group.lines), group.lines[group.first]
    if not is_top or any("." in name for name in names):
        yield f"### {coded(f'[{name}]' for name in names)}\n"
    says = {name: text for name in names if (text := _says(name)) and text not in (each.meaning for each in lines)}
    bullets = [f"- `{name}`: {text}" for name, text in says.items()]
    same = [f"Its keys are those of `[{_LIKE[group.first]}]`."] if group.first in _LIKE else []
    yield "\n".join([*(bullets if len(names) > 1 else says.values()), *same])
    if same:
        return
    with_only = any(_only(line) for line in lines)
    head = ["key", *(["goes with"] if with_only else []), "may be", "default", "changes", "what it is"]
    yield f"{chr(10) * bool(says)}{cells(*head)}\n{'|---' * len(head)}|"
    for number, line in enumerate(lines):
        name = line.key.rpartition(".")[2]
        may = ", ".join(filter(None, (line.type, re.sub(r"matches (.*)", r"matches `\1`", line.range))))
        default = _default({table: lines[number].default for table, lines in group.lines.items()})
        only = [_only(line)] if with_only else []
        yield cells(f"`{name}`", *only, may, default, line.changes, line.meaning)


def _default(by_table: Mapping[str, str]) -> str:
    """The default of a key; where tables differ in it, the usual one and then who has another."""
    tables: dict[str, list[str]] = {}
    for table, default in by_table.items():
        tables.setdefault(default, []).append(table.rpartition(".")[2])
    usual = max(tables, key=lambda default: len(tables[default]))
    others = [f"{coded(names)}: `{default}`" for default, names in tables.items() if default != usual]
    return "; ".join([REQUIRED if usual == REQUIRED else f"`{usual}`", *others])


def _only(line: KeyLine) -> str:
    """The alternative that a key goes with; that its own table must be written is no such thing."""
    tag, _, names = line.only.partition(" = ")
    if line.only.startswith("[") or not line.only:
        return ""
    return f"`{tag}` {names.replace(' or ', ', ')}" if " or " in names else f"`{line.only}`"


def _says(table: str) -> str:
    """The sentence about a table, of the key that names it or else of its class."""
    found = tree.keys_at(tree.of(Recipe), tuple(table.removesuffix(".*").split("."))) if table else []
    says = dict.fromkeys(key.description for key in found if key.description)
    return " ".join(says)


_LIKE = {
    "reward.parallel": "actor.parallel",
    "data.train.sources.*": "data.train",
    "reward.parts.*": "reward",
    "reward.cases.*": "reward",
    "reward.otherwise": "reward",
}
"""Tables whose keys are those of another one, all or nearly all: a part of a reward is a reward."""


def _groups() -> Iterator[_Group]:
    """Tables in the order of the schema; those with the same keys together, those that repeat others below one that
    does left out."""
    tables: dict[str, list[KeyLine]] = {}
    for line in key_lines():
        tables.setdefault(line.key.rpartition(".")[0], []).append(line)
    groups: dict[Sequence[object], dict[str, list[KeyLine]]] = {}
    for table, lines in tables.items():
        if not any(table.startswith(f"{inner}.") for inner in (*_LIKE, "data.eval.*")):
            same = tuple(
                replace(each, key=each.key.rpartition(".")[2], only=_only(each), default="") for each in lines
            )
            groups.setdefault((table if table in _LIKE else "", same), {})[table] = lines
    return (_Group(found) for found in groups.values())
