"""The recipe is a folder of scripts, not a package: put it on the path."""

import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"
sys.path.insert(0, str(RECIPE))
