"""The recipes' folders have scripts, not packages: put them on the path."""

import sys
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path[:0] = [str(RECIPES / "quickstart"), str(RECIPES / "own/calculator")]
