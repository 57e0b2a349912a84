"""Generated pages docs/recipe.md and docs/metrics.md, from the recipe schema and the metric registry.

`make docs` writes them, and a test compares them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ppoctl.cli.manual.algorithm_pages import cells, coded
from ppoctl.cli.manual.guides import Guide, groups, guide
from ppoctl.cli.manual.keys import REQUIRED, KeyLine, key_lines
from ppoctl.core.metric_registry import METRICS, Metric
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

METRICS_HEAD = """# Metrics

Every metric that a run reports. In a terminal, `ppoctl recipes metrics NAME` prints one metric, and
`ppoctl recipes metrics policy` prints a group. [Reading curves](reading-curves.md) explains the curves of a complete
run, and what to change if a run does not learn. `[expect]`, `[until]`, `checkpoint.best` and `[health]` of a recipe
use these names.

If the name of a metric is a link, a guide below the table explains how to read the metric and what to do.

`make docs` generates this page from `src/ppoctl/core/metric_registry.py` and `src/ppoctl/cli/manual/guides.toml`.
"""

RECIPE_HEAD = """# Every key of a recipe

A recipe is one TOML file, or several, of which later files override earlier ones. An unknown key is an error, and so
is a value of another type (`"8"` is not a number). A key that is not written has the default below; `required` means
that the key has no default. An [annotated recipe](annotated.toml) shows the usual keys. [Algorithms](algorithms.md)
lists formulas, sources, and the systems with the same defaults. In a terminal, `ppoctl recipes keys TABLE` prints a
table, and `ppoctl recipes keys lr` looks up a word.

Tables of several files are merged key by key, with two exceptions: a layout (`parallel`) replaces the earlier layout
completely, and so does a table that changes its `kind`, `place` or `format`. `--set KEY=VALUE`, or an environment
variable such as `PPOCTL_PPO__EPOCHS`, overrides all files for one key. If the value is a table, it replaces the
complete table, and its missing keys have their defaults. `--set expect={}` removes all expectations.
`--set 'actor.parallel={pipeline=2}'` is a layout of two processes and replaces the layout in the file;
`--set actor.parallel.pipeline=2` changes only that key of the layout.

The column `changes` is the effect of another value. **results**: the training results; a run in progress uses the new
value from its next step on. **speed**: time and memory; results are equal up to rounding. **reporting**: output,
retention or the length of the run. `*` stands for a name of your choice.

`make docs` generates this page from the docstrings in `src/ppoctl/recipe` and `src/ppoctl/rewards`.
"""


def metrics() -> str:
    """Return the page docs/metrics.md."""
    lines = [METRICS_HEAD, *(f"- [{name}](#{name}): {description}" for name, description in groups().items())]
    for group, description in groups().items():
        members = [metric for metric in METRICS if metric.name.startswith(f"{group}/")]
        lines += [
            "",
            f"## {group}",
            "",
            description,
            "",
            "| metric | unit | meaning | healthy |",
            "|---|---|---|---|",
        ]
        lines += [cells(_linked(metric), metric.unit, metric.description, metric.healthy) for metric in members]
        for metric in members:
            if advice := guide(metric):
                lines += ["", f"### `{metric.name}`", "", *metric_lines(metric, advice, "- ")]
    return "\n".join(lines) + "\n"


def metric_lines(metric: Metric, found: Guide, mark: str = "") -> list[str]:
    """Return the lines of a guide: how to read the metric, its healthy values, and what to do in which case."""
    healthy = f" Healthy: {metric.healthy}." if metric.healthy else ""
    return [found.read + healthy, "", *(f"{mark}**{observation}**: {advice}." for observation, advice in found.when)]


def _linked(metric: Metric) -> str:
    anchor = "".join(char for char in metric.name if char.isalnum() or char in "_-")
    return f"[`{metric.name}`](#{anchor})" if guide(metric) else f"`{metric.name}`"


@dataclass(frozen=True)
class _Group:
    """Tables of the recipe with the same keys, which are documented together."""

    lines: Mapping[str, list[KeyLine]]
    """Lines by the dotted name of the table. The lines of all tables are equal except for the defaults."""

    @property
    def first(self) -> str:
        return next(iter(self.lines))


def recipe() -> str:
    """Return the page docs/recipe.md."""
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
    descriptions = {
        name: text for name in names if (text := _description(name)) and text not in (line.meaning for line in lines)
    }
    bullets = [f"- `{name}`: {text}" for name, text in descriptions.items()]
    same = [f"It has the keys of `[{_LIKE[group.first]}]`."] if group.first in _LIKE else []
    yield "\n".join([*(bullets if len(names) > 1 else descriptions.values()), *same])
    if same:
        return
    with_only = any(_only(line) for line in lines)
    head = ["key", *(["only with"] if with_only else []), "value", "default", "changes", "meaning"]
    yield f"{chr(10) * bool(descriptions)}{cells(*head)}\n{'|---' * len(head)}|"
    for number, line in enumerate(lines):
        name = line.key.rpartition(".")[2]
        value = ", ".join(filter(None, (line.type, re.sub(r"matches (.*)", r"matches `\1`", line.range))))
        default = _default({table: lines[number].default for table, lines in group.lines.items()})
        only = [_only(line)] if with_only else []
        yield cells(f"`{name}`", *only, value, default, line.changes, line.meaning)


def _default(by_table: Mapping[str, str]) -> str:
    """Return the default of a key; if tables differ, the most common default, then the tables with another
    default."""
    tables: dict[str, list[str]] = {}
    for table, default in by_table.items():
        tables.setdefault(default, []).append(table.rpartition(".")[2])
    usual = max(tables, key=lambda default: len(tables[default]))
    others = [f"{coded(names)}: `{default}`" for default, names in tables.items() if default != usual]
    return "; ".join([REQUIRED if usual == REQUIRED else f"`{usual}`", *others])


def _only(line: KeyLine) -> str:
    """Return the alternative that a key belongs to; empty if the key only requires that its table is written."""
    tag, _, names = line.only.partition(" = ")
    if line.only.startswith("[") or not line.only:
        return ""
    return f"`{tag}` {names.replace(' or ', ', ')}" if " or " in names else f"`{line.only}`"


def _description(table: str) -> str:
    """Return the docstring of the key that names a table; empty if the key has none."""
    keys = tree.keys_at(tree.of(Recipe), tuple(table.removesuffix(".*").split("."))) if table else []
    descriptions = dict.fromkeys(key.description for key in keys if key.description)
    return " ".join(descriptions)


_LIKE = {
    "reward.parallel": "actor.parallel",
    "data.train.sources.*": "data.train",
    "reward.parts.*": "reward",
    "reward.cases.*": "reward",
    "reward.otherwise": "reward",
}
"""Tables that have (nearly) all keys of another table, such as the parts of a reward."""


_VALUE_HEAD = 'on = "actor"'
"""The alternative of `[critic]` that the page documents apart from the keys of `[actor]` and `[critic]`."""


def _groups() -> Iterator[_Group]:
    """Yield the tables in schema order, grouped by equal keys, without the tables below those in `_LIKE`."""
    tables: dict[tuple[str, str], list[KeyLine]] = {}
    for line in key_lines():
        part = line.only if line.only == _VALUE_HEAD else ""
        tables.setdefault((line.key.rpartition(".")[0], part), []).append(line)
    groups: dict[Sequence[object], dict[str, list[KeyLine]]] = {}
    for (table, _), lines in tables.items():
        if not any(table.startswith(f"{inner}.") for inner in (*_LIKE, "data.eval.*")):
            same = tuple(
                replace(line, key=line.key.rpartition(".")[2], only=_only(line), default="") for line in lines
            )
            groups.setdefault((table if table in _LIKE else "", same), {})[table] = lines
    return (_Group(tables_with_same_keys) for tables_with_same_keys in groups.values())
