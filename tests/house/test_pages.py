"""The pages of docs/ that are made of docstrings and tables are what `make docs` makes."""

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from house.conftest import PACKAGE, ROOT
from ppoctl.errors import ExitCode
from ppoctl.metrics import METRICS, find
from ppoctl.recipe import foreign, pages, reference
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.features import SECTIONS, features
from ppoctl.recipe.guides import groups
from ppoctl.recipe.keys import key_lines
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.table import RESULTS

ALGORITHM = ("ppo", "reward", "rollout", "model", "actor.optimizer", "critic.optimizer")
"""Where a key that changes results is one of the algorithm."""


@pytest.mark.parametrize(
    "page",
    [pages.algorithms, pages.coming_from, reference.recipe, reference.metrics],
    ids=["algorithms", "coming-from", "recipe", "metrics"],
)
def test_a_page_is_what_is_made(page: Callable[[], str]) -> None:
    file = ROOT / "docs" / f"{page.__name__.replace('_', '-')}.md"
    assert file.read_text("utf-8") == page().rstrip("\n") + "\n", "make docs"


def rows() -> list[str]:
    """Every key of the tables of docs/algorithms.md, and every key and alternative that a heading names."""
    lines = pages.algorithms().splitlines()
    in_rows = [name for line in lines if line.startswith("| `") for name in _coded(line.split(" | ")[0])]
    headings = [name for line in lines if line.startswith("### ") for name in _coded(line)]
    return in_rows + [name.partition(" = ")[0] for name in headings]


def _coded(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def results() -> dict[str, int]:
    """Dotted keys of the algorithm that change results, each with how many classes declare it: alternatives that have
    a key of one name each tell it."""
    declared: dict[str, set[type]] = {}
    for path, owner, key in _keys(tree.of(Recipe)):
        if path.startswith("reward.otherwise"):
            continue  # it may be whatever `reward` may be
        if key.effect is RESULTS and any(f"{path}.".startswith(f"{each}.") for each in ALGORITHM):
            declared.setdefault(path, set()).add(owner)
    return {path: len(owners) for path, owners in declared.items()}


def _keys(table: tree.TableNode, path: tuple[str, ...] = ()) -> list[tuple[str, type, tree.Key]]:
    found = []
    for name, key in table.keys.items():
        owner = next(c for c in table.model.__mro__ if key.attribute in c.__dict__.get("__annotations__", {}))  # noqa: RUF063
        found.append((dotted((*path, name)), owner, key))
        inner = key.node.tables.values() if isinstance(key.node, tree.Choice) else [key.node]
        for each in inner:
            if isinstance(each, tree.TableNode):
                found += _keys(each, (*path, name))
    return found


def test_every_key_of_the_algorithm_stands_in_the_page_once_for_each_class_that_declares_it() -> None:
    told, wanted = Counter(rows()), results()
    assert len(wanted) > 40
    assert {name: told[name] for name in wanted} == wanted


def test_no_section_is_empty_and_every_figure_that_is_named_is_reported() -> None:
    assert {feature.section for feature in features()} == set(SECTIONS)
    told = [(part.names, told) for part in features() for told in (part.told, *(key.told for key in part.keys))]
    assert [(names, figure) for names, said in told for figure in said.figures if find(figure) is None] == []


WITHOUT = (
    "model", "model.critic", "rollout", "reward", "reward.kind", "steps", "epochs", "checkpoint", "checkpoint.best",
    "checkpoint.keep_last", "checkpoint.best_keep", "checkpoint.best_direction",
)  # fmt: skip
"""Parts that compute nothing which anybody published."""


def test_every_part_that_computes_says_its_formula_its_source_and_whose_default_it_has() -> None:
    for part in features():
        names = {name.partition(" = ")[0] for name in part.names}
        if names <= set(WITHOUT) or any(name.endswith(' = "none"') for name in part.names):
            continue
        of_keys = any(key.told.default_of for key in part.keys)
        assert part.told.formula, part.names
        assert part.told.source, part.names
        assert part.told.default_of or of_keys, part.names


def test_the_reference_has_every_key_and_every_metric() -> None:
    recipe, metrics = reference.recipe(), reference.metrics()
    names = {line.key.rpartition(".")[2] for line in key_lines()}
    assert len(names) > 150
    assert [name for name in sorted(names) if f"\n| `{name}` |" not in recipe] == []
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in metrics] == []


def test_a_default_that_differs_between_tables_is_told_for_each() -> None:
    page = reference.recipe()
    assert "\n| `from_step` | whole number, at least 1 | `1`; `explained_variance`: `10` | reporting |" in page
    assert '\n| `gae_lambda` | `kind = "gae"` | number, at least 0, at most 1 | `1.0` | results |' in page


WRITTEN = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ("coming-from.md", "design.md")]


@pytest.mark.parametrize("page", WRITTEN, ids=[page.name for page in WRITTEN])
def test_keys_and_metrics_that_a_page_names_are_there(page: Path) -> None:
    """A dotted word in backticks that begins with a table of the recipe is a key, or a table; one with a slash that
    begins with a group of metrics is a metric."""
    root, said = tree.of(Recipe), _coded(re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8")))
    keys = {word for word in said if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.split(".")[0] in root.keys}
    figures = {
        word for word in said if re.fullmatch(r"[a-z]+(/[a-z_0-9]+)+", word) and word.split("/")[0] in groups()
    }
    wrong = [word for word in sorted(keys) if not tree.keys_at(root, tuple(word.split(".")))]
    assert wrong + [word for word in sorted(figures) if find(word) is None] == []


FOR_WHOM = ("algorithms", "design", "gpu", "many-nodes", "run-directory", "scaling", "security", "slurm")


@pytest.mark.parametrize("page", FOR_WHOM)
def test_a_page_says_first_for_whom_it_is_and_then_what_to_type_or_see(page: str) -> None:
    lines = (ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines()
    assert lines[2].startswith("For ")
    begins = next(number for number, line in enumerate(lines) if line.startswith(("```", "    ")))
    assert begins <= 13


def test_the_quickstart_is_explained_as_it_is_written() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    recipe = [
        " ".join(line.split()) for line in (ROOT / "recipes" / "quickstart.toml").read_text("utf-8").splitlines()
    ]
    rows = page.partition("## The recipe")[2].partition("## The console")[0].splitlines()
    told = [text for row in rows if row.startswith("| `") for text in _coded(row.split(" | ")[0])]
    lines = [text for text in told if " = " in text]
    assert len(lines) >= 10
    assert [text for text in lines if not any(line.startswith(text) for line in recipe)] == []
    tables = {line.split(" #")[0] for line in recipe if line.startswith("[")}
    assert tables - {"[actor.batching]", "[critic.batching]"} == {text for text in told if text.startswith("[")}


def test_every_exit_code_has_a_first_look() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    codes = [int(code) for row in re.findall(r"(?m)^\| ([\d, ]+) \|", page) for code in row.split(", ")]
    assert codes == [int(code) for code in ExitCode if code is not ExitCode.DONE]


# --- the table of other systems -----------------------------------------------------------------------------------


FOREIGN = [tomllib.loads(file.read_text("utf-8")) for file in sorted((PACKAGE / "recipe" / "foreign_keys").glob("*"))]


def written() -> list[tuple[str, str, dict[str, str]]]:
    """(system, key, row) of the files, as they are written."""
    return [(table["name"], key, row) for table in FOREIGN for key, row in table["keys"].items()]


def test_every_key_that_a_row_names_is_there() -> None:
    ours = {name.replace("ROLE", "actor") for _, _, row in written() for name in row.get("is", "").split(", ")} - {""}
    assert [name for name in sorted(ours) if not is_there(name)] == []


def is_there(ours: str) -> bool:
    """Whether the schema has a key of ours, and allows the value that stands behind it."""
    name, _, value = ours.partition(" = ")
    keys = tree.keys_at(tree.of(Recipe), tuple(name.split(".")))
    if not value:
        return bool(keys)
    return any(tomllib.loads(f"value = {value}")["value"] in tree.allowed(key.field.annotation) for key in keys)


def test_every_row_says_something() -> None:
    for system, key, row in written():
        assert set(row) <= {"is", "note"}, (system, key)
        assert row.get("is") or row.get("note"), (system, key)
        assert str(row).isascii(), (system, key)


def test_every_list_of_keys_without_a_meaning_has_a_reason() -> None:
    assert {table["name"] for table in FOREIGN} == {system.name for system in foreign.systems()}
    for table in FOREIGN:
        for each in table.get("unused", []):
            assert set(each) == {"keys", "why"}, table["name"]
            assert str(each).isascii(), table["name"]
            assert len(each["why"]) > 15, table["name"]
            assert each["keys"], each["why"]


def test_every_key_is_answered_by_its_own_row() -> None:
    rows = [
        (row, their, ours)
        for s in foreign.systems()
        for row in s.rows
        for their, ours in zip(row.theirs, row.ours, strict=True)
    ]
    for row, their, ours in rows:
        answers = foreign.find(tuple(their.removesuffix(".*").split(".")))
        own = foreign.Answer(row.system, their, ours, row.note)
        assert own in answers, their
        # A key that several systems have is the same key of ours.
        assert {answer.ours for answer in answers if answer.ours} <= {ours}, their
