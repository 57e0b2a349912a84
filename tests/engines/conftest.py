"""All tests in this folder start real engines, so they run in a separate pytest process (see the Makefile)."""

from pathlib import Path

import pytest

from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)


@pytest.fixture(scope="session")
def shipped() -> dict[str, Recipe]:
    """Return all recipes of `recipes/` by name."""
    return {path.stem: load([path], [], {"PPOCTL_DATA": "none"}).recipe for path in sorted(RECIPES.rglob("*.toml"))}
