"""Every command in the docs can be typed: it is parsed by the real command line, and executed if it only reads.

A command begins with `ppoctl` and the name of a command, in a block (fenced or indented) or between backticks. Blocks
of ```text are output; tests/cli/screens.py covers docs/screens.md. The test fails for a command that is neither
executed nor listed below as not executed.
"""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from conventions.conftest import ROOT
from fakes.components import fake_recipe
from fakes.job import play
from ppoctl.cli.app import app, run

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "recipes/quickstart/README.md")),
    *sorted(ROOT.glob("*/*.md")),
]
COMMANDS = typer.main.get_command(app)
NAMES = set(COMMANDS.commands)  # type: ignore[attr-defined]

RUN = (
    "--version", "recipes", "validate", "plan", "preview", "status", "logs", "compare", "resume", "runs", "plot",
    "diagnose",
)  # fmt: skip
"""Commands that only read, except with the options below; `resume` with `--plan`."""
NOT_RUN = {
    "train": "minutes",
    "eval": "loads an engine",
    "convert-ckpt": "loads torch",
    "profile": "runs a step; tests/runs types it",
    "doctor": "speaks of the machine it runs on",
    "stop": "changes a run",
    "--install-completion": "writes into the files of the shell",
    "help": "is --help with other words",
    "rm": "deletes a run; tests/cli types it",
    "report": "writes a file; tests/report types it",
    "track": "sends to MLflow",
    "show": "wants the tokenizer of the run, which one on fakes has not; tests/end_to_end types it",
    "recipes copy": "writes",
    "validate --stage": "fetches from a hub",
    "validate --reward": "starts scorers; tests/cli types it",
    "preview --set-name": "an evaluation set of the page's own",
    "plan --here": "speaks of the machine it runs on",
    "plan --sbatch": "wants what a cluster is told; tests/submission types it",
    "plan --set": "a layout of the page's own",
    "resume --set": "a layout of the page's own",
    "logs -f": "ends with the run",
    "logs --what": "files of another kind of run",
    "compare --eval": "wants evaluations; tests/cli types it",
}
"""Commands, with or without an option, that are parsed but not executed, each with the reason."""
FILLED = {
    "STEP": "1",
    "N": "1",
    "SECONDS": "1",
    "JOBS": "2",
    "TABLE": "rollout",
    "WORD": "lr",
    "SYSTEM": "verl",
    "COMMAND": "plan",
    "KEY": "rollout.top_p",
}
"""Capitalized placeholders for a number or a name; all other placeholders may be any text."""
METRIC = "policy/clip_frac"


class Typed(NamedTuple):
    page: str
    words: tuple[str, ...]
    in_text: bool
    """Whether the command is in a sentence, where it may be named without its arguments."""

    @property
    def name(self) -> str:
        return self.words[0]


def written() -> Iterator[Typed]:
    """Yield every command of every page."""
    known = "|".join(sorted({*NAMES, "--version"}))
    begins = re.compile(rf"^ *(?:\$ )?(?:\.venv/bin/)?ppoctl (?=\w)|(?<![\w'`-])ppoctl (?=(?:{known})(?![\w./-]))")
    for page in PAGES:
        is_block = fenced = is_output = False
        for line in page.read_text("utf-8").splitlines():
            if line.startswith("```"):
                fenced, is_output = not fenced, not fenced and line.startswith("```text")
                continue
            if is_output:
                continue
            is_block = fenced or line.startswith("    ")
            found = [line[m.end() :] for m in begins.finditer(line)] if is_block else []
            spans = re.findall(r"`ppoctl ([^`]+)`", line)
            for text, in_text in [
                *((text, False) for text in found),
                *((text, True) for text in spans if not is_block),
            ]:
                yield Typed(str(page.relative_to(ROOT)), tuple(words_of(text)), in_text)


def words_of(text: str) -> list[str]:
    """Return the words of a command as a shell would split them, up to its end; of alternatives the first."""
    lexer = shlex.shlex(re.sub(r"\b([a-z]+)(\|[a-z]+)+", r"\1", text), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    with suppress(ValueError):  # an apostrophe in a sentence
        for word in lexer:
            if set(word) <= set("();<>|&") or word.startswith("`"):
                break
            words.append(word.rstrip(".,:`"))
            if word.endswith((",", ":", "`")):
                break
    name = METRIC if words[:2] == ["recipes", "metrics"] else "quickstart"
    return [{**FILLED, "NAME": name}.get(word, word) for word in words if word]


ALL = list(dict.fromkeys(written()))


def parse(words: tuple[str, ...]) -> None:
    """Parse a command as the command line would, without running it."""
    command, rest = COMMANDS, [word for word in words if word not in ("--version", "--install-completion")]
    if rest[:1] == ["help"]:
        rest = [*rest[1:], "--help"]
    context = typer.Context(command, info_name="ppoctl")
    while rest and hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(context, rest)
        context = typer.Context(command, info_name=words[0], parent=context)
    with suppress(typer.Exit):  # from `--help`
        command.make_context(words[0], rest).close()


def test_commands_of_docs_are_parsed() -> None:
    refused = {}
    for typed in ALL:
        depth = 2 if typed.name == "recipes" else 1
        if not (typed.in_text and len(typed.words) <= depth):
            try:
                parse(typed.words)
            except Exception as error:  # noqa: BLE001 - typer's errors of a command line have no public base class
                refused[f"{typed.page}: {' '.join(typed.words)}"] = str(error)
    assert refused == {}


def test_every_documented_command_is_run_or_listed_as_not_run() -> None:
    assert len(ALL) > 100
    assert {each.name for each in ALL} <= {*RUN, *(name.split()[0] for name in NOT_RUN)}
    assert set(RUN) & set(NOT_RUN) == set()
    used = [name for name in NOT_RUN if any(is_named(name, each) for each in ALL)]
    assert [name for name in NOT_RUN if name not in used] == [], "no page types it any more"


def is_named(what: str, typed: Typed) -> bool:
    """Return whether an entry of `NOT_RUN` covers this command."""
    name, _, more = what.partition(" ")
    return typed.name == name and (not more or more in typed.words)


def is_run(typed: Typed) -> bool:
    if typed.name not in RUN or any(is_named(what, typed) for what in NOT_RUN):
        return False
    is_complete = (
        not typed.in_text or typed.name == "--version" or len(typed.words) > (2 if typed.name == "recipes" else 1)
    )
    return is_complete and (typed.name != "resume" or "--plan" in typed.words)


def for_folder(words: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the recipe and run names of the page by the one recipe and the one run of `folder`."""
    stands_for = {
        "RECIPE": "recipe.toml",
        **dict.fromkeys(("RUN", "OTHER", "my", "other", "q1", "q2", "gsm8k-2"), "run"),
    }
    return tuple(
        "recipe.toml" if word.endswith(".toml") else "run" if word.startswith("runs/") else stands_for.get(word, word)
        for word in words
    )


TO_RUN = list(dict.fromkeys(for_folder(each.words) for each in ALL if is_run(each)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the quickstart's recipe and a finished run, to stand for the recipes and runs of the
    pages."""
    made = tmp_path_factory.mktemp("pages")
    play(made / "runs" / "run", fake_recipe(steps=1))
    (made / "runs" / "run" / "logs" / "attempt-1" / "console.log").write_text("step 1/1\n", "utf-8")
    text = (ROOT / "recipes" / "quickstart.toml").read_text("utf-8").replace("train.jsonl", "test.jsonl")
    (made / "recipe.toml").write_text(text.replace('"quickstart/', f'"{ROOT}/recipes/quickstart/'), "utf-8")
    return made


def run_cases() -> Iterator[Any]:
    """Yield the commands. Only CI runs one that differs from an earlier one in numbers or in GPUs to search."""
    first: dict[str, str] = {}
    for words in TO_RUN:
        typed = " ".join(words)
        without = re.sub("(--fit .*) --gpus.*", r"\1", re.sub(r"[\d.]+", "N", typed))
        same = first.setdefault(without, typed)
        yield pytest.param(words, id=typed, marks=[] if same == typed else [pytest.mark.ci(same)])


@pytest.mark.parametrize("words", list(run_cases()))
def test_read_only_commands_in_docs_succeed(
    words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    code = run(list(words))
    assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_of_docs_resolve(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "`code`", page.read_text("utf-8"))
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith(("http", "mailto"))]
    assert [link for link in links if not is_there(page, link)] == []


def test_docs_table_of_contents_lists_every_page() -> None:
    contents = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = [page.name for page in sorted((ROOT / "docs").iterdir()) if page.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in contents] == []


def is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"(?m)^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8")))
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
