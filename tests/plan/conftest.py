"""The smallest recipe in an empty folder, as the tests of recipes have it."""

from recipe.conftest import smallest as smallest
from recipe.conftest import write as write
