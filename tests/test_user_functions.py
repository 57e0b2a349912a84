"""A file that Python runs is imported, for rows, rewards and all else that a recipe names as `path.py:name`."""

import hashlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import RecipeError
from ppoctl.core.user_functions import digest_of, import_command, imported, require_function, siblings
from ppoctl.data.row_tables import PythonRows
from ppoctl.data.rows import read_rows

Write = Callable[..., Path]
ROWS = "def rows():\n    yield {'prompt': ask(), 'answer': '4'}\n"


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Return a function that writes files with Python code, and returns the folder. Imports are undone."""
    path, modules = list(sys.path), set(sys.modules)

    def written(folder: str = "", **files: str) -> Path:
        (tmp_path / folder).mkdir(exist_ok=True)
        for name, code in files.items():
            (tmp_path / folder / f"{name}.py").write_text(code, "utf-8")
        return tmp_path / folder

    yield written
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass, fields

@dataclass
class Row:
    prompt: str
    count: int | None = None

def rows():
    assert len(fields(Row)) == 2
    return Row("2 + 2?")
"""


def test_classes_of_a_file_are_found_by_dataclasses_and_pickle(write: Write) -> None:
    for folder in ("a", "b"):  # files of one name
        made = imported(f"{write(folder, mine=DATACLASS)}/mine.py:rows")()
        assert pickle.loads(pickle.dumps(made)) == made


def test_rows_may_import_modules_next_to_their_file(write: Write) -> None:
    folder = write(questions="def ask(): return '2 + 2?'\n", mine="from questions import ask\n" + ROWS)
    (row,) = read_rows(PythonRows(format="python", function=f"{folder}/mine.py:rows"), name="train")
    assert row.question == "2 + 2?"
    write(questions="def ask(): return '10 + 1?'\n")
    (row,) = read_rows(PythonRows(format="python", function=f"{folder}/mine.py:rows"), name="train")
    assert row.question == "10 + 1?"


def test_numbers_of_numpy_in_rows_are_python_numbers(write: Write) -> None:
    code = (
        "import numpy as np\ndef rows():\n    for n in np.arange(1, 3):\n"
        "        more = {'each': [np.float32(n)], 'parts': np.array([n, 3])}\n"
        "        level = {'level': n / 2, 'hard': n > 1, 'more': more}\n"
        "        yield {'prompt': np.str_(f'{n} + 3?'), 'answer': n + 3, **level}\n"
    )
    table = PythonRows(format="python", function=f"{write(mine=code)}/mine.py:rows")
    _, row = read_rows(table, name="train")
    assert (row.question, row.answer) == ("2 + 3?", "5")
    assert row.fields == {"level": 1.0, "hard": True, "more": {"each": [2.0], "parts": [2, 3]}}
    assert [type(row.fields[name]) for name in ("level", "hard")] == [float, bool]


def test_values_of_pyarrow_in_rows_are_python_values(write: Write) -> None:
    code = (
        "import pyarrow as pa\ndef rows():\n"
        "    chat = pa.scalar([{'role': 'user', 'content': '2 + 3?'}])\n"
        "    yield {'prompt': chat, 'answer': pa.scalar(5), 'level': {'of': pa.scalar('a')}}\n"
    )
    (row,) = read_rows(PythonRows(format="python", function=f"{write(mine=code)}/mine.py:rows"), name="train")
    assert (row.question, row.answer, row.fields) == ((Message("user", "2 + 3?"),), "5", {"level": {"of": "a"}})


def test_module_of_the_same_name_in_another_folder_is_refused_by_name(write: Write) -> None:
    write("a", helpers="WHO = 'a'\n", mine="from helpers import WHO\ndef who(): return WHO\n")
    write("b", helpers="WHO = 'b'\n", mine="from helpers import WHO\ndef who(): return WHO\n")
    assert imported(f"{write('a')}/mine.py:who")() == "a"
    with pytest.raises(ImportError, match=r"`helpers` is `.*/a/helpers.py` in this process, not `.*/b/helpers.py`"):
        imported(f"{write('b')}/mine.py:who")


def test_digest_covers_imported_files_of_the_folder(write: Write) -> None:
    folder = write(
        mine="import math\nimport one, unused_package\ndef f():\n    from package.part import x\n",
        one="import two\n",
        two="import mine\n",
        math="",
        other="",
    )
    write("package", __init__="", part="x = 1\n")
    inside = {"one.py", "package/__init__.py", "package/part.py", "two.py"}
    assert {str(path.relative_to(folder)) for path in siblings(folder / "mine.py")} == inside
    function = f"{folder}/mine.py:f"
    first = digest_of(function)
    write(other="x = 2\n", math="x = 2\n")
    assert digest_of(function) == first
    write("package", part="x = 2\n")
    assert digest_of(function) != first
    with pytest.raises(RecipeError, match=r"mine.py`, or a file of its folder that it imports, differs"):
        require_function(function, first, whose="reward's", setting="reward.function=f", changed=RecipeError)


def test_digest_covers_packages_without_init(write: Write) -> None:
    folder = write(mine="from parts.inner import one\nimport pytest\ndef f(): return one\n")
    write("pytest", inner="one = 0\n")  # an installed module of this name wins
    write("parts", inner="one = 1\n")
    function = f"{folder}/mine.py:f"
    assert [path.name for path in siblings(folder / "mine.py")] == ["inner.py"]
    assert imported(function)() == 1
    before = digest_of(function)
    write("parts", inner="one = 23\n")
    assert (digest_of(function) != before, imported(function)()) == (True, 23)
    other = write("b", mine="from parts.inner import one\ndef f(): return one\n") / "mine.py"
    (other.parent / "parts").mkdir()
    (other.parent / "parts" / "inner.py").write_text("one = 4\n")
    with pytest.raises(ImportError, match=r"`parts` is `.*/parts` in this process, not `.*/b/parts`"):
        imported(f"{other}:f")


def test_digest_of_a_file_alone_is_that_of_older_runs(write: Write) -> None:
    folder = write(mine="import one\n", one="", alone="import json\n")
    alone = hashlib.sha256((folder / "alone.py").read_bytes()).hexdigest()
    assert digest_of(f"{folder}/alone.py:f") == alone
    recorded = hashlib.sha256((folder / "mine.py").read_bytes()).hexdigest()
    require_function(f"{folder}/mine.py:f", recorded, whose="", setting="", changed=RecipeError)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("def other(): pass\n", "has no `rows`; it defines other"),
        ("rows = 3\n", "`rows` of `.*` is a int, not a function"),
        ("import wrong\n", "`wrong` is .* in this process, not"),
    ],
)
def test_hint_of_a_failed_import_fails_in_the_same_way(write: Write, code: str, says: str) -> None:
    folder = write(mine=code)
    if "wrong" in code:
        (folder / "wrong.py").write_text("")
        sys.path.insert(0, str(write("before", wrong="")))
    function = f"{folder}/mine.py:rows"
    with pytest.raises(RecipeError, match=says) as caught:
        read_rows(PythonRows(format="python", function=function), name="train")
    assert caught.value.hint == import_command(function)
    if "wrong" not in code:
        command = caught.value.hint.replace("python", sys.executable, 1)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines()[-1].partition(": ")[2][:20] in caught.value.message
