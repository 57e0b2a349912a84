"""Rules between keys of a recipe: functions that yield a finding for each conflict."""

from collections.abc import Callable, Iterator, Mapping
from inspect import isfunction
from typing import Any

from ppoctl.finding import Finding
from ppoctl.recipe.schema import Recipe

Rule = Callable[[Recipe], Iterator[Finding]]
"""A function that yields each conflict that it finds between keys of a recipe."""


def rules_of(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of a module, in the order of their definition: the public functions whose return type is
    `Iterator[Finding]`."""
    functions = [member for name, member in module.items() if isfunction(member) and not name.startswith("_")]
    return tuple(member for member in functions if member.__annotations__.get("return") == Iterator[Finding])
