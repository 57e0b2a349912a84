"""The screens of docs/screens.md that need no training: a command as typed, and its output on a terminal.

    python tests/cli/screens.py         rewrites these screens of the page

They show two fixture runs, `screens.tar.gz` next to this file: recipes/quickstart.toml with two seeds, in small and
without its saved states, made by

    ppoctl train recipes/quickstart.toml --set name=seed-7 --set seed=7 --set steps=6 --set tracking.kind='"none"' \
        --set rollout.prompts_per_step=16 --set ppo.minibatch_seqs=8 --set data.eval.heldout.max_rows=20 \
        --set eval.every_steps=3 --set checkpoint.every_steps=3 \
        --set 'expect={"eval/heldout/pass_at_1"={min=0.4, rise_min=0.05}}'
"""

import io
import json
import re
import shlex
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from ppoctl.cli.app import run
from ppoctl.core.batch.sealed_json import ChecksumMismatchError, seal, unseal

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "screens.md"
KEPT = Path(__file__).with_name("screens.tar.gz")
CHECKOUT = "/home/you/ppoctl"
"""Path of the checkout on the page."""
NOW = 1795467560.0
"""Three minutes after the end of the fixture runs."""


class Screen(NamedTuple):
    typed: str
    """The words after `ppoctl`."""
    columns: int = 80
    head: int = 40
    """Lines that the page shows; a longer screen is cut there, and `...` added."""


SCREENS = {
    "legend": Screen("recipes metrics ev", head=16),
    "runs": Screen("runs"),
    "status": Screen("status seed-42"),
    "show": Screen("show seed-42 --worst"),
    "list": Screen("show seed-42 --list --sort advantage --limit 8", columns=100),
    "prompt": Screen("show seed-42 --prompt train/003562-5641199a", columns=100),
    "eval-samples": Screen("show seed-42 --eval --limit 8"),
    "gone": Screen("show seed-42 --step 1"),
    "diagnose": Screen("diagnose seed-42"),
    "plot": Screen("plot seed-42 --metric reward/score_mean"),
    "compare": Screen("compare seed-42 seed-7", columns=100),
    "report": Screen("report seed-42 seed-7 -o both.html"),
    "keys": Screen("recipes keys lr", head=24),
    "commands": Screen("--help", head=60),
    "help": Screen("help status"),
    "wrong-key": Screen("validate recipes/quickstart.toml --set rollout.temprature=0.9"),
    "validate": Screen("validate recipes/quickstart.toml"),
    "plan": Screen("plan recipes/quickstart.toml", head=24),
    "rm": Screen("rm seed-7 --yes"),
}


class Terminal(io.StringIO):
    """A terminal that records its output."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def unpack(folder: Path) -> None:
    """Unpack the fixture runs into a folder, with the models, rows and recipes of this checkout."""
    with tarfile.open(KEPT) as kept:
        kept.extractall(folder, filter="data")
    for file in (path for path in folder.rglob("*") if path.suffix in (".toml", ".json")):
        text = file.read_text("utf-8")
        if CHECKOUT not in text:
            continue
        try:
            body = unseal(text)
        except ChecksumMismatchError:
            file.write_text(text.replace(CHECKOUT, str(ROOT)), "utf-8")
            continue
        moved = json.loads(json.dumps(body).replace(CHECKOUT, str(ROOT)))
        file.write_text(seal(moved, indent=1), "utf-8")
    (folder / "recipes").symlink_to(ROOT / "recipes")


def captured(name: str, folder: Path) -> str:
    """Return the command and its output on a terminal, as they are in the page."""
    screen, terminal = SCREENS[name], Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.stdout", terminal)
        patch.setattr("sys.stderr", terminal)
        patch.setattr("time.time", lambda: NOW)
        around = {"COLUMNS": screen.columns, "LINES": 50, "NO_COLOR": 1, "TERM": "xterm", "PAGER": "/no/pager"}
        for variable, value in around.items():
            patch.setenv(variable, str(value))
        run(shlex.split(screen.typed))
    printed = re.sub(r"[^\n]*\r\x1b\[K", "", terminal.getvalue())  # of a rewritten line, the last version
    printed = printed.replace(str(folder.resolve()), "/home/you").replace(str(ROOT), CHECKOUT)
    lines = [f"$ ppoctl {screen.typed}", *(line.rstrip() for line in printed.rstrip().splitlines())]
    return "\n".join(lines if len(lines) <= screen.head + 1 else [*lines[: screen.head], "..."])


def blocks(page: str) -> dict[str, str]:
    """Return the screens of the page by name: blocks that begin with ```text NAME."""
    return dict(re.findall(r"(?ms)^```text (\S+)\n(.*?)\n```$", page))


def kind(text: str) -> str:
    """Return the text in one line with `#` for each number and `quickstart` for each run."""
    text = re.sub(r"\b(seed-\d+|draft)\b", "quickstart", " ".join(text.replace("/home/you/", "").split()))
    text = re.sub(r"-?\b\d[\d.,]*(e-?\d+)?(?=[hms]?\b)", "#", text)
    return re.sub(r"[\u2581-\u2588]+", "~", re.sub(r"#[hms]( #[ms])*", "#s", text))


def kinds(lines: list[str]) -> set[str]:
    """Return the kinds of lines that a training prints, except those that only a silence causes."""
    found = {kind(line) for line in lines}
    return {
        each for each in found if "pass_at_1" in each or not re.search(r" #s( # tok/s)?$", each) or " eta " in each
    }


def main() -> None:
    """Rewrite the screens of the page."""
    page = PAGE.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        for name in SCREENS:
            block = f"```text {name}\n{captured(name, Path(folder))}\n```"
            page = re.sub(rf"(?ms)^```text {name}\n.*?^```$", lambda found, block=block: block, page)
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
