"""Output of libraries, in separate processes: file descriptors belong to a process."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

BEGIN = """
    import os, subprocess, sys
    from pathlib import Path
    from ppoctl.show.tracking.library_output import LIBRARY_OUTPUT

    def library(word):
        print(word, "by Python")
        print(word, "to stderr", file=sys.stderr)
        os.write(2, f"{word} by C\\n".encode())
        subprocess.run(["echo", word, "by a child"])
"""


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", dedent(BEGIN) + dedent(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_library_output_goes_to_the_log_and_messages_to_stderr(tmp_path: Path) -> None:
    found = run(
        """
        with LIBRARY_OUTPUT.kept_apart() as stream:
            library("early")
            print("ours", file=stream)
            LIBRARY_OUTPUT.into(Path("libraries.log"))
            library("late")
        print("result")
        """,
        tmp_path,
    )
    assert (found.stdout, found.stderr, found.returncode) == ("result\n", "ours\n", 0)
    ways = ("by Python", "to stderr", "by C", "by a child")
    log = (tmp_path / "libraries.log").read_text().splitlines()
    assert sorted(log[:4]) == sorted(f"early {way}" for way in ways)
    assert sorted(log[4:]) == sorted(f"late {way}" for way in ways)


def test_early_library_output_is_printed_if_the_command_fails(tmp_path: Path) -> None:
    found = run(
        """
        with LIBRARY_OUTPUT.kept_apart():
            library("telling")
            raise SystemExit(3)
        """,
        tmp_path,
    )
    assert found.returncode == 3
    assert "telling by C" in found.stderr
    assert found.stdout == ""


def test_library_output_stays_in_the_log_after_an_error(tmp_path: Path) -> None:
    script = """
        with LIBRARY_OUTPUT.kept_apart():
            LIBRARY_OUTPUT.into(Path("libraries.log"))
            {library}
            raise SystemExit(3)
    """
    found = run(script.format(library="library('late')"), tmp_path)
    assert (found.stdout, found.stderr) == ("", "")
    assert "late by C" in (tmp_path / "libraries.log").read_text()
    (tmp_path / "libraries.log").unlink()
    run(script.format(library="pass"), tmp_path)
    assert not (tmp_path / "libraries.log").exists()


def test_replaced_stderr_is_left_alone(tmp_path: Path) -> None:
    found = run(
        """
        import io
        sys.stderr = io.StringIO()
        with LIBRARY_OUTPUT.kept_apart() as stream:
            assert stream is sys.stderr
            library("notebook")
        """,
        tmp_path,
    )
    assert "notebook by Python" in found.stdout
    assert "notebook by C" in found.stderr
