"""Messages, help, pages, docstrings, comments and test names are plain English, and a class name has one meaning.

`prose.RULES` has the forms that are refused, with what to write instead. docs/glossary.md has the terms.
"""

import ast
from collections import Counter, defaultdict

import pytest

from conventions.conftest import nodes, trees
from conventions.prose import KINDS, RULES, sentences, violations


def test_no_sentence_has_a_refused_form() -> None:
    counts = Counter(sentence.kind for sentence in sentences())
    assert min(counts[kind] for kind in KINDS) > 1000, counts
    found = {rule.instead: violations(rule, name)[:20] for name, rule in RULES.items()}
    assert not any(found.values()), "\n".join(
        line for instead, wrong in found.items() if wrong for line in (f"write `{instead}`:", *wrong)
    )


@pytest.mark.parametrize("name", RULES)
def test_each_rule_refuses_its_form(name: str) -> None:
    refused = {
        "is no": "this is no shell", "figure": "the figures of a step", "draw": "responses are drawn",
        "story": "the story of a step", "tell": "it tells the loop", "told": "the stage is told to stop",
        "law": "a law of the code", "mend": "mend the reward", "anew": "it starts anew", "nobody": "nobody reads it",
        "goes on": "the run goes on", "at work": "a run at work", "but for": "equal but for rounding",
        "of before": "records of before", "so many": "after so many tokens", "let go": "memory is let go of",
        "without a word": "it ended without a word", "opening": "What is kept stays.",
        "docstring": "Where it is kept.",
    }[name]  # fmt: skip
    assert RULES[name].pattern.search(refused)
    assert not RULES[name].pattern.search(
        "The generator returns log-probs; is no longer used, and the run continues."
    )


def test_class_name_has_one_meaning() -> None:
    """No class shares its name with a class or a type alias of another module."""
    classes, names = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for module, tree in trees().items():
        for node in nodes()[module]:
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(str(module))
                names[node.name].append(str(module))
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id].append(str(module))
    assert {name: names[name] for name in classes if len(names[name]) > 1} == {}
