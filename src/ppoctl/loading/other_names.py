"""Names in other systems of the alternatives of a table, from the docstrings of the alternatives."""

from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.docstring_fields import parse_docstring


def known_elsewhere(choice: tree.Choice, name: str) -> str:
    """Return `; KIND is SYSTEM's NAME` for each alternative that another system calls so; empty: none."""
    found: dict[str, str] = {}
    for kind, table in choice.tables.items():
        for system, names in parse_docstring(table.model.__doc__ or "").other_names:
            for each in names.split(", "):
                if each.partition(" ")[0].lower() == name.lower():  # a note in parentheses may follow the name
                    found.setdefault(kind, f'; `"{kind}"` is {each} of {system}')
    return "".join(found.values())
