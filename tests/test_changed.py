"""The selection of test files near a change."""

import subprocess
from pathlib import Path

import pytest

from changed import changed_files, importers, near

FILES = {
    "src/pkg/leaf.py": "",
    "src/pkg/user.py": "from pkg.leaf import (\n    one,  # why\n    two as three,\n)\n",
    "src/pkg/far.py": "def late():\n    import pkg.user\n",
    "src/pkg/alone.py": "",
    "src/pkg/first.py": "from pkg import alone\n",
    "src/pkg/second.py": "from pkg import first\n",
    "tests/unit/lab.py": "from pkg.user import four\n",
    "tests/unit/test_leaf.py": "from pkg.leaf import one\n",
    "tests/unit/test_user.py": "from pkg.user import four\n",
    "tests/unit/test_lab.py": "import lab\n",
    "tests/unit/test_far.py": "import pkg.far\n",
    "tests/unit/test_second.py": "from pkg.second import x\n",
    "tests/part/conftest.py": "",
    "tests/part/test_part.py": "",
    "tests/unit/test_page.py": "PAGE = 'page.md'\n",
    "docs/page.md": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("src/pkg/leaf.py", {"leaf", "user"}),  # test_lab and test_far are three steps away
        ("src/pkg/user.py", {"user", "lab", "far"}),
        ("src/pkg/alone.py", {"second"}),  # three steps, because fewer find none
        ("tests/unit/lab.py", {"lab"}),
        ("tests/unit/test_far.py", {"far"}),
        ("tests/part/conftest.py", {"part"}),
        ("docs/page.md", {"page"}),
    ],
)
def test_tests_near_a_change_are_selected(root: Path, changed: str, tests: set[str]) -> None:
    found = near([root / changed], importers(root), root / "tests")
    assert {file.stem.removeprefix("test_") for file in found} == tests


def test_change_is_that_of_the_working_tree_or_of_the_last_commit(root: Path) -> None:
    (root / "src/pkg/leaf.py").write_text("one = 1\n")
    (root / "new.txt").write_text("")
    assert set(changed_files(root)) == {root / "src/pkg/leaf.py", root / "new.txt"}
    for words in (["add", "."], ["commit", "-q", "-m", "second"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)
    assert set(changed_files(root)) == {root / "src/pkg/leaf.py", root / "new.txt"}
