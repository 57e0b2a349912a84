"""Shared by all tests: the folder itself is importable (`fakes`, `tolerance`), and torch uses one thread by default."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
