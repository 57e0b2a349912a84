"""The smallest recipe in an empty folder, as in the tests of recipes."""

from recipe.conftest import smallest as smallest
from recipe.conftest import write as write
