"""Conventions of the schema: every key is documented, declares its effect, and can be set to every allowed value."""

from typing import Any, get_args

from for_each import for_each
from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import Effect, word_for_none
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.docstring_fields import parse_docstring
from ppoctl.recipe.loading.explain import TERMS
from ppoctl.recipe.loading.key_examples import EXAMPLES
from ppoctl.recipe.schema import Recipe

KEYS = list(tree.walk(tree.of(Recipe)))
LEAVES = [(path, key) for path, key in KEYS if isinstance(key.node, tree.Leaf)]
TABLES = [(path, key) for path, key in KEYS if not isinstance(key.node, tree.Leaf)]


@for_each(LEAVES)
def test_every_key_has_one_docstring_and_one_effect(path: KeyPath, key: tree.RecipeKey) -> None:
    effects = [item for item in key.field.metadata if isinstance(item, Effect)]
    assert len(effects) == 1
    doc = key.description
    assert doc.endswith(".")
    assert doc[0].isupper() or not doc[0].isalpha() or doc.split()[0].rstrip(":,") in ("k1", "stop", "kl", "policy")


@for_each(TABLES)
def test_tables_declare_no_effect(path: KeyPath, key: tree.RecipeKey) -> None:
    assert key.each is not None or not [item for item in key.field.metadata if isinstance(item, Effect)]


def test_every_table_class_has_a_docstring() -> None:
    models: set[Any] = {Recipe}
    for _, key in KEYS:
        shapes = [key.node.each] if isinstance(key.node, tree.NamedTables) else [key.node]
        for shape in shapes:
            tables = shape.tables.values() if isinstance(shape, tree.Choice) else [shape]
            models |= {table.model for table in tables if isinstance(table, tree.TableNode)}
    assert len(models) > 25
    assert [model.__name__ for model in models if not parse_docstring(model.__doc__ or "").prose.endswith(".")] == []


def test_optional_key_defaults_to_none_or_has_word_for_none() -> None:
    """TOML has no null: with another default, absence could not be written, unless a word represents it."""
    optional = [key for _, key in LEAVES if type(None) in get_args(key.field.annotation)]
    assert len(optional) > 8
    assert all(key.field.default is None or word_for_none(key.field.metadata) for key in optional)


def test_every_required_key_has_an_example_line() -> None:
    required = {path[-1] for path, key in LEAVES if key.required and not tree.allowed(key.field.annotation)}
    assert required <= set(EXAMPLES)


def test_terms_of_other_systems_map_to_existing_keys() -> None:
    names = {path[-1] for path, _ in KEYS}
    assert set(TERMS.values()) <= names
    assert not set(TERMS) & names


def test_megatron_and_vllm_terms_are_read_from_key_docstrings() -> None:
    assert TERMS["tensor_model_parallel_size"] == "tensor"
    assert TERMS["max_num_seqs"] == "max_concurrent_seqs"
    assert TERMS["use_distributed_optimizer"] == "distributed_optimizer"


def test_quantity_keys_include_their_unit() -> None:
    """A duration or size without its unit is misread sooner or later. A text contains its unit."""
    bare = {"timeout", "tokens", "memory", "duration", "interval", "size"}
    texts = {str, str | None}
    named = [path for path, key in LEAVES if path[-1] in bare and key.field.annotation not in texts]
    # The names of the limits of an episode are units.
    assert {path[-2:] for path in named} == {("environment", "tokens")}
