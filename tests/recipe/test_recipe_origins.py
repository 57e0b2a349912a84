"""The lines of keys, in every syntax that tomllib accepts."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.core.key_path import dotted
from ppoctl.recipe.loading.origins import lines_of
from ppoctl.recipe.loading.write import as_toml

DOCUMENT = '''\
# [not.a.table] = 1
name = "x" # comment = 2
a.b . "c.d" = [ # open
  1, # one
  { e = 2, f.g = "]}" },
]
text = """
[also.not]
key = 1
"""
raw = \'\'\'
[nor.this]\'\'\'
date = 2024-01-01T00:00:00Z

[t . u]
"quoted key" = {h = 1,i = [ ]}
\'lit\' = \'a\\\'
[[array]]
k = 1
[[array]]
k = 2
[array.sub]
k = 3
'''


def test_each_key_has_its_line_number() -> None:
    tomllib.loads(DOCUMENT)
    lines = lines_of(DOCUMENT)
    expected = {
        ("name",): 2,
        ("a", "b", "c.d"): 3,
        ("text",): 7,
        ("raw",): 11,
        ("date",): 13,
        ("t", "u"): 15,
        ("t", "u", "quoted key", "h"): 16,
        ("t", "u", "quoted key", "i"): 16,
        ("t", "u", "lit"): 17,
        ("array",): 18,
        ("array", "k"): 19,
        ("array", "sub", "k"): 23,
    }
    assert {path: lines.get(path) for path in expected} == expected
    assert not any("not" in path or "nor" in path or "key" in path for path in lines)


names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"]), min_size=1, max_size=6)
leaves = st.one_of(st.integers(), st.booleans(), st.text(max_size=8), st.lists(st.integers(), max_size=3))
tables = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(names, tables, min_size=1, max_size=4))
def test_random_toml_document_has_line_of_each_key(document: dict[str, Any]) -> None:
    """One key per line, so that the line of each is known."""
    text = "".join(f"\n{dotted((name,))} = {as_toml(value)}\n" for name, value in document.items())
    assert tomllib.loads(text) == document
    lines = lines_of(text)
    for index, name in enumerate(document):
        assert lines[(name,)] == 2 * index + 2
    assert {path[0] for path in lines} == set(document)


STRINGS = [
    "a = [ # ]",
    "  \"]\", '[', # [",
    "]",
    'b = """"y"" \\""" ] """""',
    "c = ''''['''''",
    "d = {e = [",
    '  "}"',
    '], f = ""}',
    "g = '\\'",
]


def test_brackets_in_strings_and_comments_are_ignored() -> None:
    text = "\n".join(STRINGS)
    assert tomllib.loads(text)["b"] == '"y"" """ ] ""'
    assert lines_of(text) == {
        ("a",): 1, ("b",): 4, ("c",): 5, ("d",): 6, ("d", "e"): 6, ("d", "f"): 6, ("g",): 9,
    }  # fmt: skip


def test_lines_of_parses_every_character_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of arrays has a `]` on every line."""
    parsed: list[str] = []
    read = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or read(text))
    text = "a = [\n" + "  [1],\n" * 500 + "]\nb = 1"
    assert lines_of(text) == {("a",): 1, ("b",): 503}
    assert "".join(parsed) == text + "\n"


def test_dotted_keys_are_quoted_when_toml_requires_quotes() -> None:
    assert dotted(("expect", "reward/mean", "min")) == 'expect."reward/mean".min'
    assert dotted(("a", "b-c_1")) == "a.b-c_1"
