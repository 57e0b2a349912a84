"""Each table of a recipe with a plain value in its place, and each alternative with only its name."""

from pathlib import Path

from ppoctl.core.key_path import dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.loading.load import examine
from ppoctl.recipe.schema import Recipe

KEYS = {
    tuple("a" if name == tree.ANY_NAME else name for name in path): key for path, key in tree.walk(tree.of(Recipe))
}
TABLES = [path for path, key in KEYS.items() if not isinstance(key.node, tree.Leaf)]
ALTERNATIVES = [
    f'{dotted(path)}={{{key.node.tag}="{kind}"}}'
    for path, key in KEYS.items()
    if isinstance(key.node, tree.Choice) and key.node.tag
    for kind in key.node.tables
]


def told(file: Path, *settings: str) -> list[str]:
    _, problems = examine([file], settings, {})
    return [problem.what for problem in problems]


def test_value_instead_of_table_is_named(smallest: Path) -> None:
    wrong = {path: told(smallest, f"{dotted(path)}=3") for path in TABLES}
    assert {path: says for path, says in wrong.items() if not any("`" in each for each in says)} == {}
    for role in ("actor", "critic"):
        assert wrong[role, "batching"] == [f"`{role}.batching` is `3`: must be a table"]


def test_incomplete_alternative_error_names_missing_keys(smallest: Path) -> None:
    said = {setting: told(smallest, setting) for setting in ALTERNATIVES}
    assert len(said) > 50
    assert said['reward={kind="choose"}'] == [
        "missing table [reward.cases]; add [reward.cases.NAME] with a name of your choice"
    ]
    assert said['reward={kind="sum"}'] == [
        "missing table [reward.parts]; add [reward.parts.NAME] with a name of your choice"
    ]
    assert (
        "missing table [data.train.sources]; add [data.train.sources.NAME] with a name of your choice"
        in (said['data.train={format="mix"}'])
    )


def test_old_boolean_offload_is_converted_despite_other_errors(smallest: Path) -> None:
    assert told(smallest, "cluster.offload=false", "steps=x") == ['`steps` is `"x"`: must be a whole number']
