"""The generated pages of docs/ equal the output of `make docs`."""

import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import get_origin

import pytest

from conventions.conftest import PACKAGE, ROOT
from ppoctl.cli.manual import algorithm_pages, reference_pages
from ppoctl.cli.manual.features import SECTIONS, features
from ppoctl.cli.manual.guides import groups
from ppoctl.cli.manual.keys import key_lines
from ppoctl.core.errors import ExitCode
from ppoctl.core.key_path import dotted
from ppoctl.core.metric_registry import METRICS, find
from ppoctl.core.recipe_table import RESULTS
from ppoctl.models.families import FAMILIES
from ppoctl.recipe import key_mappings
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

ALGORITHM = ("ppo", "reward", "rollout", "model", "actor.optimizer", "critic.optimizer")
"""Tables whose keys, if they change results, belong to the algorithm."""


@pytest.mark.parametrize(
    "page",
    [algorithm_pages.algorithms, algorithm_pages.coming_from, reference_pages.recipe, reference_pages.metrics],
    ids=["algorithms", "coming-from", "recipe", "metrics"],
)
def test_generated_pages_are_up_to_date(page: Callable[[], str]) -> None:
    file = ROOT / "docs" / f"{page.__name__.replace('_', '-')}.md"
    assert file.read_text("utf-8") == page().rstrip("\n") + "\n", "make docs"


def test_pages_state_the_number_of_families() -> None:
    number = ["six", "seven", "eight", "nine", "ten"][len(FAMILIES) - 6]
    stated = {}
    for page in (ROOT / "README.md", ROOT / "docs" / "limits.md"):
        found = re.search(r"(\w+) (?:model\s+)?families", page.read_text("utf-8").replace("[", ""))
        stated[page.name] = found and found[1]
    assert stated == {"README.md": number, "limits.md": number}


def rows() -> list[str]:
    """Return every key in the tables of docs/algorithms.md, and every key and alternative in a heading."""
    lines = algorithm_pages.algorithms().splitlines()
    in_rows = [name for line in lines if line.startswith("| `") for name in _coded(line.split(" | ")[0])]
    headings = [name for line in lines if line.startswith("### ") for name in _coded(line)]
    return in_rows + [name.partition(" = ")[0] for name in headings]


def _coded(text: str) -> list[str]:
    return re.findall(r"`([^`]*)`", text)


def results() -> dict[str, int]:
    """Return the dotted keys of the algorithm that change results, with the number of classes that declare each: the
    page lists a key once for each alternative that has it."""
    declared: dict[str, set[type]] = {}
    for path, owner, key in _keys(tree.of(Recipe)):
        if path.startswith("reward.otherwise"):
            continue  # the same alternatives as `reward`
        if key.effect is RESULTS and any(f"{path}.".startswith(f"{each}.") for each in ALGORITHM):
            declared.setdefault(path, set()).add(owner)
    return {path: len(owners) for path, owners in declared.items()}


def _keys(table: tree.TableNode, path: tuple[str, ...] = ()) -> list[tuple[str, type, tree.RecipeKey]]:
    found = []
    for name, key in table.keys.items():
        owner = next(c for c in table.model.__mro__ if key.attribute in c.__dict__.get("__annotations__", {}))  # noqa: RUF063
        found.append((dotted((*path, name)), owner, key))
        inner = key.node.tables.values() if isinstance(key.node, tree.Choice) else [key.node]
        for each in inner:
            if isinstance(each, tree.TableNode):
                found += _keys(each, (*path, name))
    return found


def test_algorithms_page_lists_each_key_once_per_declaring_class() -> None:
    documented, wanted = Counter(rows()), results()
    assert len(wanted) > 40
    assert {name: documented[name] for name in wanted} == wanted


def test_feature_sections_are_filled_and_name_known_metrics() -> None:
    assert {feature.section for feature in features()} == set(SECTIONS)
    documented = [
        (part.names, documented)
        for part in features()
        for documented in (part.docstring, *(key.docstring for key in part.keys))
    ]
    assert [
        (names, metric) for names, docstring in documented for metric in docstring.metrics if find(metric) is None
    ] == []


WITHOUT = (
    "model", "model.critic", "model.reference", "rollout", "reward", "reward.kind", "steps", "epochs", "checkpoint",
    "checkpoint.best", "checkpoint.keep_last", "checkpoint.best_keep", "checkpoint.best_direction",
)  # fmt: skip
"""Features without a published formula."""


def test_every_computing_feature_has_formula_source_and_default() -> None:
    for part in features():
        names = {name.partition(" = ")[0] for name in part.names}
        if names <= set(WITHOUT) or any(name.endswith(' = "none"') for name in part.names):
            continue
        of_keys = any(key.docstring.default_of for key in part.keys)
        assert part.docstring.formula, part.names
        assert part.docstring.source, part.names
        assert part.docstring.default_of or of_keys, part.names


def test_reference_lists_every_key_and_metric() -> None:
    recipe, metrics = reference_pages.recipe(), reference_pages.metrics()
    names = {line.key.rpartition(".")[2] for line in key_lines()}
    assert len(names) > 150
    assert [name for name in sorted(names) if f"\n| `{name}` |" not in recipe] == []
    assert [metric.name for metric in METRICS if f"`{metric.name}`" not in metrics] == []


def test_reference_shows_each_default_that_differs_by_table() -> None:
    page = reference_pages.recipe()
    assert "\n| `from_step` | whole number, at least 1 | `1`; `explained_variance`: `10` | reporting |" in page
    assert '\n| `gae_lambda` | `kind = "gae"` | number, at least 0, at most 1 | `1.0` | results |' in page


WRITTEN = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ("coming-from.md", "design.md")]


@pytest.mark.parametrize("page", WRITTEN, ids=[page.name for page in WRITTEN])
def test_keys_and_metrics_named_in_docs_exist(page: Path) -> None:
    """In backticks, a dotted word that begins with a table of the recipe is a key or table; a word with a slash that
    begins with a metric group is a metric."""
    root, coded = tree.of(Recipe), _coded(re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8")))
    keys = {word for word in coded if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word) and word.split(".")[0] in root.keys}
    metric_names = {
        word for word in coded if re.fullmatch(r"[a-z]+(/[a-z_0-9]+)+", word) and word.split("/")[0] in groups()
    }
    wrong = [word for word in sorted(keys) if not tree.keys_at(root, tuple(word.split(".")))]
    assert wrong + [word for word in sorted(metric_names) if find(word) is None] == []


FOR_WHOM = ("algorithms", "design", "gpu", "many-nodes", "run-directory", "scaling", "security", "slurm")


@pytest.mark.parametrize("page", FOR_WHOM)
def test_docs_page_starts_with_audience_and_example(page: str) -> None:
    lines = (ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines()
    assert lines[2].startswith("For ")
    begins = next(number for number, line in enumerate(lines) if line.startswith(("```", "    ")))
    assert begins <= 13


def test_quickstart_page_explains_every_line_of_recipe() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text("utf-8")
    recipe = [
        " ".join(line.split()) for line in (ROOT / "recipes" / "quickstart.toml").read_text("utf-8").splitlines()
    ]
    rows = page.partition("## The recipe")[2].partition("## The console")[0].splitlines()
    named = [text for row in rows if row.startswith("| `") for text in _coded(row.split(" | ")[0])]
    lines = [text for text in named if " = " in text]
    assert len(lines) >= 10
    assert [text for text in lines if not any(line.startswith(text) for line in recipe)] == []
    tables = {line.split(" #")[0] for line in recipe if line.startswith("[")}
    assert tables - {"[actor.batching]", "[critic.batching]"} == {text for text in named if text.startswith("[")}


def test_troubleshooting_covers_every_exit_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    codes = [int(code) for row in re.findall(r"(?m)^\| ([\d, ]+) \|", page) for code in row.split(", ")]
    assert codes == [int(code) for code in ExitCode if code is not ExitCode.DONE]


# --- key mappings of other systems -------------------------------------------------------------------------------


FOREIGN = [
    tomllib.loads(file.read_text("utf-8")) for file in sorted((PACKAGE / "recipe" / "other_systems").glob("*"))
]


def written() -> list[tuple[str, str, dict[str, str]]]:
    """Return (system, key, row) of the mapping files, as written."""
    return [(table["name"], key, row) for table in FOREIGN for key, row in table["keys"].items()]


def test_key_mappings_name_existing_recipe_keys() -> None:
    ours = {name.replace("ROLE", "actor") for _, _, row in written() for name in row.get("is", "").split(", ")} - {""}
    assert [name for name in sorted(ours) if not is_there(name)] == []


def is_there(ours: str) -> bool:
    """Return whether the schema has this key of ppoctl, and allows the value after it: a listed value, or an
    array."""
    name, _, value = ours.partition(" = ")
    keys = tree.keys_at(tree.of(Recipe), tuple(name.split(".")))
    if not value:
        return bool(keys)
    given = tomllib.loads(f"value = {value}")["value"]
    return any(
        get_origin(key.field.annotation) is tuple
        if isinstance(given, list)
        else given in tree.allowed(key.field.annotation)
        for key in keys
    )


def test_every_key_mapping_has_key_or_note() -> None:
    for system, key, row in written():
        assert set(row) <= {"is", "note", "values"}, (system, key)
        assert row.get("is") or row.get("note"), (system, key)
        assert str(row).isascii(), (system, key)


def test_unused_keys_of_other_systems_have_a_reason() -> None:
    assert {table["name"] for table in FOREIGN} == {system.name for system in key_mappings.systems()}
    for table in FOREIGN:
        for each in table.get("unused", []):
            assert set(each) == {"keys", "why"}, table["name"]
            assert str(each).isascii(), table["name"]
            assert len(each["why"]) > 15, table["name"]
            assert each["keys"], each["why"]


def test_every_key_of_other_systems_finds_its_mapping() -> None:
    rows = [
        (row, their, ours)
        for s in key_mappings.systems()
        for row in s.rows
        for their, ours in zip(row.theirs, row.ours, strict=True)
    ]
    for row, their, ours in rows:
        answers = key_mappings.find(tuple(their.removesuffix(".*").split(".")))
        own = key_mappings.KeyAnswer(row.system, their, ours, row.note, row.values)
        assert own in answers, their
        # A key that several systems share maps to the same key of ppoctl.
        assert {answer.ours for answer in answers if answer.ours} <= {ours}, their
