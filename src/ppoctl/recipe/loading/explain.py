"""Turn pydantic's validation errors into problems that use the terms of the recipe file.

Each problem names the origin of the value, the dotted key, the value, and a correction: a similar key, the table that
the key belongs to, the allowed values, or a line to add.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ppoctl.core.errors import quoted, without_secrets
from ppoctl.core.finding import Finding, problem
from ppoctl.core.key_path import KeyPath, dotted, quoted_text
from ppoctl.environments.tools import BUILT_IN
from ppoctl.recipe import key_mappings
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.docstring_fields import parse_docstring
from ppoctl.recipe.loading.capabilities import planned_key, planned_value
from ppoctl.recipe.loading.key_examples import EXAMPLES
from ppoctl.recipe.loading.layers import Layers
from ppoctl.recipe.loading.origins import DEFAULT, paths_in
from ppoctl.recipe.schema import Recipe

ROOT = tree.of(Recipe)

_TERM = re.compile(r"(?:Megatron-Core|vLLM)'s\s+`(\w+)`")
_OURS = {path[-1] for path, _ in tree.walk(ROOT)}
TERMS = {
    term: path[-1]
    for path, key in tree.walk(ROOT)
    for term in _TERM.findall(key.field.description or "")
    if term not in _OURS
}
"""Name of a setting in Megatron-Core or vLLM -> key of ppoctl whose docstring contains this name.

A name that is also a key of ppoctl is left out.
"""

_KNOWN = "a known feature that is not available yet"

_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be `true` or `false`",
    "string_type": "must be text, in quotes (with --set: 'key=\"text\"')",
    "finite_number": "must be finite",
    "tuple_type": "must be an array",
    "union_tag_not_found": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "dict_type": "must be a table",
    "string_pattern_mismatch": "must be letters, digits, `.`, `_` and `-`, and begin with a letter or digit",
}

_NAMES = {"function": ("function", "score"), "path": ("class or async function", "Environment")}
"""Key of a `path.py:name` -> what it names, and an example of a name."""

_BOUNDS = {
    "greater_than": ("must be greater than", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be less than", "lt"),
    "less_than_equal": ("must be at most", "le"),
}


def problems_of(error: ValidationError, layers: Layers) -> list[Finding]:
    """Return all errors of pydantic as problems, in the order of the lines of the files; problems without a line, and
    keys that are missing at the top of a recipe, are last."""
    errors = error.errors(include_url=False)
    if "epochs" in layers.written:  # `steps` is missing only until the rows of an epoch can be counted
        errors = [details for details in errors if details["loc"] != ("steps",)]
    # pydantic counts only the valid entries of an array, and then also reports that there are too few.
    wrong = {details["loc"][:-1] for details in errors if details["loc"]}
    errors = [details for details in errors if details["type"] != "too_short" or details["loc"] not in wrong]
    found = [finding for details in errors for finding in _explain(details, layers)]
    return sorted(found, key=lambda finding: _line(finding, layers))  # stable: otherwise the order of the schema


def _line(finding: Finding, layers: Layers) -> tuple[int, int]:
    """Return the position of a problem in the files: the number of the file and of the line."""
    name, _, line = finding.where.rpartition(":")
    files = [str(file) for file in layers.files]
    return (files.index(name), int(line)) if name in files and line.isdigit() else (len(files), 0)


def as_toml(value: Any) -> str:
    """Return a Python value as TOML text of any length; None becomes `absent`."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "absent"}[value]
    if isinstance(value, str):
        return quoted_text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((str(key),))} = {as_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(inner) for inner in value) + "]"
    return str(value)


def shown(value: Any) -> str:
    """Return a Python value as TOML text of at most 80 characters, without the secrets of URIs."""
    text = without_secrets(as_toml(value))
    return text if len(text) <= 80 else text[:77] + "..."


def similar(name: str, known: Sequence[str]) -> str:
    """Return `; did you mean ...?` with the nearest known name; empty: no name is similar."""
    close = get_close_matches(name, known, n=1, cutoff=0.7) or get_close_matches(name.lower(), known, n=1, cutoff=0.7)
    return f"; did you mean `{close[0]}`?" if close else ""


def section(path: KeyPath) -> str:
    """Return a table as its heading in the file: `[actor.optimizer]`, or the top of the file."""
    return f"[{dotted(path)}]" if path else "the top of the file, before the first [section]"


def _explain(details: ErrorDetails, layers: Layers) -> Sequence[Finding]:
    path = tree.without_tags(ROOT, details["loc"])
    kind = details["type"]
    if kind == "missing" and not isinstance(details["loc"][-1], int):
        return [_missing(path, layers)]
    is_ours = bool(tree.keys_at(ROOT, path))  # another alternative of the table has the key
    if kind == "extra_forbidden" and not is_ours and (foreign := _foreign_keys(path, details["input"], layers)):
        return foreign
    explain = _EXPLANATIONS.get(kind)
    message = explain(path, details, layers) if explain else _wrong_value(path, details)
    choice = tree.at(ROOT, path, layers.written)
    tag = (choice.tag,) if kind == "union_tag_invalid" and isinstance(choice, tree.Choice) and choice.tag else ()
    place = layers.place((*path, *tag))
    # If the key of an alternative is absent, the problem gets the origin of the table around the key.
    place = layers.place(path[:-1]) if place == DEFAULT and len(path) > 1 else place
    hidden = _foreign_keys_of_unknown_kind(path, choice, layers) if kind.startswith("union_tag") else []
    return [problem(message, place, _look_up(path)), *hidden]


def _foreign_keys(path: KeyPath, value: Any, layers: Layers) -> list[Finding]:
    """Return problems for an unknown key that other systems have, or one problem for a planned feature.

    If the value is a table, each key inside it is a problem. The list is empty if no other system has any of the
    keys.
    """
    inside = list(paths_in(value)) if isinstance(value, Mapping) else []
    tables = {other[:-1] for other in inside}
    keys = [(*path, *inner) for inner in inside if inner not in tables] or [path]
    answers = {key: key_mappings.find(key) for key in keys}
    if not any(answers.values()) and (planned := planned_key(path[-1])):
        message = f"unknown key `{dotted(path)}`; it is {_KNOWN}: {planned}"
        return [problem(message, layers.place(path), "ppoctl recipes keys requires")]
    # A name that is similar to a key of this table is a typo, so keys of other systems are not suggested.
    near = similar(path[-1], _keys_at(path[:-1], layers))
    suggestions = {key: None if answers[key] or near else key_mappings.nearest(key) for key in keys}
    if not any(answers.values()) and not any(suggestions.values()):
        return []
    problems = []
    for key, matches in answers.items():
        suggestion = suggestions[key]
        theirs = _in(value, key, path)
        parts = [answer.message(theirs) + _off(answer, theirs) for answer in matches]
        parts += [suggestion.suggests] if suggestion else []
        ours = next((answer.ours[0] for answer in (*matches, suggestion) if answer and answer.ours), None)
        hint = f"ppoctl recipes keys {quoted(ours.partition(' = ')[0])}" if ours else None
        problems.append(problem("; ".join([f"unknown key `{dotted(key)}`", *parts]), layers.place(key), hint))
    return problems


def _foreign_keys_of_unknown_kind(path: KeyPath, choice: tree.Node | None, layers: Layers) -> list[Finding]:
    """Return problems for keys of other systems in a table of unknown kind, whose keys pydantic does not check."""
    tables = choice.tables.values() if isinstance(choice, tree.Choice) else ()
    known = {name for table in tables for name in table.keys}
    keys = [((*path, name), value) for name, value in _written(path, layers).items() if name not in known]
    return [finding for key, value in keys for finding in _foreign_keys(key, value, layers)]


def _in(value: Any, key: KeyPath, path: KeyPath) -> Any:
    """Return the value at `key`, given the value at `path`, which is `key` or a table around it."""
    for name in key[len(path) :]:
        value = value[name]
    return value


def _off(answer: key_mappings.KeyAnswer, value: Any) -> str:
    """Return advice to leave the key out if its value is false or 0 and the feature is off by default, otherwise
    an empty text."""
    if not answer.ours or isinstance(value, Mapping) or value != 0 or answer.named(value) in answer.values:
        return ""
    name, chosen, _ = answer.ours[0].partition(" = ")
    usual = [key.field.default for key in tree.keys_at(ROOT, tuple(name.split(".")))]
    is_off = bool(chosen) or name.endswith("coef") or any(default in (None, False, 0) for default in usual)
    return f"; its value is `{shown(value)}`, so leave it out" if is_off else ""


def _look_up(path: KeyPath) -> str:
    return f"ppoctl recipes keys {path[0]}" if path and path[0] in ROOT.keys else "ppoctl recipes keys"


def _wrong_value(path: KeyPath, details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        wrong = f"{words} {context[bound]}"
    elif kind == "too_long":
        wrong = f"must have {context['max_length']} entries"
    elif kind == "missing":  # pydantic names the missing entry of an array
        return f"`{dotted(path[:-1])}` is `{shown(details['input'])}`: must have more entries"
    elif kind == "string_pattern_mismatch" and path[-1] in _NAMES:
        place = details["input"].rpartition(":")[0] or details["input"]
        what, name = _NAMES[path[-1]]
        wrong = f"does not name a {what}; write `{place.rstrip(':')}:{name}`"
    elif kind == "string_pattern_mismatch" and "tools" in path[-2:]:
        known = ", ".join(f"`{tool}`" for tool in BUILT_IN)
        wrong = f"must be {known}, or `path.py:name` of a function{similar(details['input'], BUILT_IN)}"
    elif kind == "string_pattern_mismatch" and path[-1] == "url":
        wrong = "must begin with `http://` or `https://` and the name of a host"
    else:
        text = details["msg"].removeprefix("Value error, ")  # raised by a validator of ppoctl
        wrong = _TYPES.get(kind) or text[0].lower() + text[1:]
    return f"`{dotted(path)}` is `{shown(details['input'])}`: {wrong}"


def _wrong_literal(path: KeyPath, details: ErrorDetails, layers: Layers) -> str:
    table = tree.at(ROOT, path[:-1], layers.written)
    if isinstance(table, tree.Choice):
        table = table.table(_written(path[:-1], layers))
    return _not_one_of(path, details["input"], _literals(table, path[-1]))


def _literals(table: tree.Node | None, name: str) -> list[str]:
    """Return the values that the schema lists for a key of a table; empty: the schema does not list values."""
    key = table.keys.get(name) if isinstance(table, tree.TableNode) else None
    return [str(value) for value in tree.allowed(key.field.annotation)] if key else []


def _wrong_tag(path: KeyPath, details: ErrorDetails, layers: Layers) -> str:
    choice = tree.at(ROOT, path, layers.written)
    if not isinstance(choice, tree.Choice) or choice.tag is None:
        return _wrong_value(path, details)
    written = details["input"][choice.tag] if isinstance(details["input"], Mapping) else details["input"]
    if planned := planned_value((*path, choice.tag), written):
        return f"`{dotted((*path, choice.tag))}` is `{shown(written)}`, {_KNOWN}: {planned}"
    known = _known_elsewhere(choice, written) if isinstance(written, str) else ""
    return f"{_not_one_of((*path, choice.tag), written, choice.tags)}{known}"


def _no_tag(path: KeyPath, details: ErrorDetails, layers: Layers) -> str:
    choice = tree.at(ROOT, path, layers.written)
    if not isinstance(choice, tree.Choice) or choice.tag is None or len(choice.tags) == 1:
        return _wrong_value(path, details)
    return f"{section(path)} needs `{choice.tag}`: {_one_of(list(choice.tables))}"


def _not_one_of(path: KeyPath, value: Any, allowed: list[str]) -> str:
    near = similar(value, allowed) if isinstance(value, str) else ""
    return f"`{dotted(path)}` is `{shown(value)}`: must be {_one_of(allowed)}{near}"


def _one_of(allowed: Sequence[str]) -> str:
    names = [f'`"{name}"`' for name in allowed]
    return names[0] if len(names) == 1 else "one of " + ", ".join(names)


def _unknown(path: KeyPath, details: ErrorDetails, layers: Layers) -> str:
    """Return the message about an unknown key: why it is unknown in its table, and which table has it."""
    name, table = path[-1], path[:-1]
    known_keys = _keys_at(table, layers)
    excluded = _excluded_by(name, table, layers)
    if excluded:
        return excluded
    ours = TERMS.get(name, name)
    wrong = f"unknown key `{dotted(path)}`"
    joined = [dotted(known) for known, _ in tree.walk(ROOT) if "_".join(known) == "_".join(path)]
    if joined:  # the name of an environment variable has one underscore instead of two
        return f"{wrong}; did you mean `{joined[0]}`?"
    if ours in known_keys:
        return f"{wrong}; did you mean `{ours}`?"
    elsewhere = [known[:-1] for known, _ in tree.walk(ROOT) if known[-1] == ours]
    # A name that is similar to a key of this table is a typo, even if another table has that name.
    near = similar(name, known_keys)
    if () in elsewhere and not near and not isinstance(ROOT.keys[ours].node, tree.Leaf):
        inside, siblings = details["input"], [(*table, known) for known in known_keys]
        if _fits(inside, (ours,), layers) or not any(_fits(inside, known, layers) for known in siblings):
            return f"{wrong}; [{ours}] is a table at the top of a recipe"
    elif elsewhere and not near:
        places = " or ".join(dict.fromkeys(section(place) for place in elsewhere[:4]))
        return f"{wrong}; `{ours}` belongs {'at' if not elsewhere[0] else 'under'} {places}"
    known = ", ".join(f"`{key}`" for key in known_keys)
    return wrong + (near or f"; {section(table) if table else 'the top of a recipe'} has {known}")


def _fits(written: Any, table: KeyPath, layers: Layers) -> bool:
    """Return whether the written value is a table whose keys all exist in `table`; then it was meant for `table`."""
    return isinstance(written, Mapping) and bool(written) and {*written} <= {*_keys_at(table, layers)}


def _keys_at(table: KeyPath, layers: Layers) -> list[str]:
    node = tree.at(ROOT, table, layers.written)
    if isinstance(node, tree.Choice):
        node = node.table(_written(table, layers))
    return list(node.keys) if isinstance(node, tree.TableNode) else []


def _excluded_by(name: str, table: KeyPath, layers: Layers) -> str | None:
    """Return the message about a key that belongs to another alternative of the table; None: no alternative has the
    key."""
    choice = tree.at(ROOT, table, layers.written)
    if not isinstance(choice, tree.Choice):
        return None
    owners = [tag for tag, other in choice.tables.items() if name in other.keys]
    if not owners:
        return None
    if choice.tag is None:
        compatible = {key for owner in owners for key in choice.tables[owner].keys}
        excluded = [key for key in _written(table, layers) if key not in compatible and _is_own(key, choice)]
        return f"`{dotted((*table, name))}` excludes `{'`, `'.join(excluded)}`: keep one of them"
    tag = dotted((*table, choice.tag))
    if not {*owners} & {*choice.tags}:
        return f"`{dotted((*table, name))}` excludes `{tag}`: keep one of them"
    chosen = choice.chosen(_written(table, layers)) or choice.usual
    needed = " or ".join(f'`{choice.tag} = "{owner}"`' for owner in owners)
    value = f'is `"{chosen}"`' if chosen in choice.tags else "is not written"
    return f"`{dotted((*table, name))}` requires {needed}, but `{tag}` {value}"


def _is_own(key: str, choice: tree.Choice) -> bool:
    """Return whether some alternatives have the key and others do not."""
    return {key in table.keys for table in choice.tables.values()} == {True, False}


def _written(path: KeyPath, layers: Layers) -> Mapping[str, Any]:
    table: Any = layers.written
    for name in path:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def _missing(path: KeyPath, layers: Layers) -> Finding:
    """Return the problem of a missing required key or table, with a line to add."""
    table, name = path[:-1], path[-1]
    place = layers.place(table) if table else DEFAULT
    where = place if place != DEFAULT else " + ".join(str(file) for file in layers.files)
    return problem(f"missing {_to_add(table, name, layers)}", where, _look_up(path))


def _to_add(table: KeyPath, name: str, layers: Layers) -> str:
    known = tree.at(ROOT, (*table, name), layers.written)
    if isinstance(known, tree.Choice):
        first = next(iter(known.tables))
        return (
            f"table {section((*table, name))}; its `{known.tag}` is {_one_of(list(known.tables))}, "
            f'e.g. `{known.tag} = "{first}"`'
        )
    if isinstance(known, tree.TableNode):
        needed = [dotted((*table, name, *key)) for key in _required(known)]
        return f"table {section((*table, name))}; it needs `{'`, `'.join(needed)}`"
    if isinstance(known, tree.NamedTables):
        return f"table {section((*table, name))}; add {section((*table, name, 'NAME'))} with a name of your choice"
    where = "under" if table else "at"
    line = f"{name} = {_example(known, table, name)}"
    instead = " or, to count in passes over the rows, `epochs = 1`" if (*table, name) == ("steps",) else ""
    return f"`{dotted((*table, name))}`; add it {where} {section(table)}, e.g. `{line}`{instead}"


def _example(known: tree.Node | None, table: KeyPath, name: str) -> str:
    values = tree.allowed(known.annotation) if isinstance(known, tree.Leaf) else ()
    own = f"environment.{name}" if "environment" in table else name
    return as_toml(values[0]) if values else EXAMPLES.get(own, EXAMPLES[name])


def _required(table: tree.TableNode) -> list[KeyPath]:
    required: list[KeyPath] = []
    for name, key in table.keys.items():
        if key.required and isinstance(key.node, tree.TableNode):
            required += [(name, *inner) for inner in _required(key.node)]
        elif key.required and isinstance(key.node, tree.Choice):
            required.append((name, key.node.tag) if key.node.tag else (name,))
        elif key.required:
            required.append((name,))
    return required


_EXPLANATIONS: dict[str, Callable[[KeyPath, ErrorDetails, Layers], str]] = {
    "extra_forbidden": _unknown,
    "literal_error": _wrong_literal,
    "union_tag_invalid": _wrong_tag,
    "union_tag_not_found": _no_tag,
}


def _known_elsewhere(choice: tree.Choice, name: str) -> str:
    """Return `; KIND is SYSTEM's NAME` for each alternative that another system calls so; empty: none."""
    found: dict[str, str] = {}
    for kind, table in choice.tables.items():
        for system, names in parse_docstring(table.model.__doc__ or "").other_names:
            for each in names.split(", "):
                if each.partition(" ")[0].lower() == name.lower():  # a note in parentheses may follow the name
                    found.setdefault(kind, f'; `"{kind}"` is {each} of {system}')
    return "".join(found.values())
