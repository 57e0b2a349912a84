"""Sentences of the repository, and the forms and words that plain English does without."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from conventions.conftest import ROOT, nodes

KINDS = ("docstring", "comment", "message", "test name", "page")


@dataclass(frozen=True)
class Sentence:
    """One sentence, in which inline code is replaced by X."""

    place: str
    """path:line of the text that contains it."""
    kind: str
    """One of `KINDS`."""
    text: str
    is_first: bool
    """Whether it begins its docstring, comment, message or paragraph."""


@dataclass(frozen=True)
class Rule:
    """A form that sentences of some kinds must not have."""

    pattern: re.Pattern[str]
    instead: str
    kinds: tuple[str, ...] = KINDS
    is_for_openings: bool = False
    """Whether only the first sentence of a docstring is checked."""


def _words(*words: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w./-])(?:{'|'.join(words)})(?![\w/-])", re.IGNORECASE)


COMPARED = "longer|more|less|fewer|later|earlier|other|different|better|worse|need|reason|way"
RULES: dict[str, Rule] = {
    "is no": Rule(
        re.compile(rf"(?<![Tt]here )\b(?:is|are|was|were) no(?! (?:{COMPARED})\b) [a-z`X]"),
        "is not a",
    ),
    "figure": Rule(_words("figures?"), "metric, value or number; figure only for a plot"),
    "draw": Rule(_words("drawn", "draws?", "drew", "drawing"), "generate (a response) or sample (a token, a row)"),
    "story": Rule(_words("story", "stories"), "step function; slow test"),
    "tell": Rule(_words("tells?", "telling", "foretold", "foretells?"), "print, report, return, predict"),
    "told": Rule(
        re.compile(r"\b(?:is|are|was|were|be|been|not) (?:told|said|heard|asked)\b(?! to be)", re.IGNORECASE),
        "is passed, reported, received, requested",
    ),
    "law": Rule(_words("laws?", "the house"), "convention (code) or invariant (record)"),
    "mend": Rule(_words("mend(?:s|ed|ing)?"), "fix (a person) or repair (the program)"),
    "anew": Rule(_words("anew"), "again, re-create"),
    "nobody": Rule(_words("nobody", "somebody", "whoever"), "the component, the caller, or the passive"),
    "goes on": Rule(_words("(?:go|goes|went) on(?! (?:a|the|each|every|one|GPU|CPU) )"), "continue, resume"),
    "at work": Rule(_words("at work"), "running"),
    "but for": Rule(_words("but for"), "except, up to"),
    "of before": Rule(_words("of before"), "earlier, previous"),
    "so many": Rule(_words("so many(?! that)"), "N, this many"),
    "let go": Rule(_words("lets? go(?: of)?"), "release"),
    "without a word": Rule(_words("without a word", "left no word"), "without reporting an error"),
    "opening": Rule(
        re.compile(r"\A(?:Of(?! course)|By(?! default| hand)|What|Whatever|Who|Nothing that|The same) "),
        "begin with the subject",
        ("docstring", "comment"),
    ),
    "docstring": Rule(
        re.compile(
            r"\A(?:Where|From|With|As|Around|Told|Said|Asked|Given|Such|In which|How (?:long|often|far|much))\b"
        ),
        "begin with a verb or a noun",
        ("docstring",),
        is_for_openings=True,
    ),
}

ORDINARY = re.compile(
    r"chart|plot|svg|png|pixel|canvas|\bpen\b|page/|"  # shapes are drawn, and a figure may be a picture
    r"page draws|drawn on a terminal|Formula: |"
    r"torch\.\w*draw|withdraw|"
    r"prose\.py|test_plain_english",  # the rules themselves
    re.IGNORECASE,
)
"""Places and sentences in which `draw` and `figure` may have their ordinary sense."""


def violations(rule: Rule, name: str) -> list[str]:
    """Each sentence of the repository that breaks the rule, with its place."""
    return [
        f"{sentence.place}: {sentence.text}"
        for sentence in sentences()
        if sentence.kind in rule.kinds
        and (sentence.is_first or not rule.is_for_openings)
        and rule.pattern.search(sentence.text)
        and not (name in ("draw", "figure") and ORDINARY.search(f"{sentence.place} {sentence.text}"))
        and not sentence.place.startswith("tests/conventions/prose.py")
    ]


@cache
def sentences() -> tuple[Sentence, ...]:
    """All sentences of source, tests, benchmarks, recipes and pages; CHANGELOG.md is history."""
    found: list[Sentence] = []
    for folder in ("src", "tests", "benchmarks", "recipes", "slurm", "docs"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".md") and not {"__pycache__"} & set(path.parts):
                found += _of_file(path)
    return (*found, *(one for page in ("README.md", "CONTRIBUTING.md") for one in _of_file(ROOT / page)))


def _of_file(path: Path) -> Iterator[Sentence]:
    place, text = path.relative_to(ROOT).as_posix(), path.read_text("utf-8")
    if "/format-" in place or ".egg-info" in place:
        return
    if path.suffix == ".py":
        yield from _of_python(place, text)
    elif path.suffix == ".toml":
        comments = [(n, line.lstrip("# ")) for n, line in enumerate(text.splitlines(), 1) if line.startswith("#")]
        yield from _joined(place, comments)
    else:
        yield from _of_page(place, text)


_WORD = re.compile(r"(?<![-\w/.$])[a-z]{2,}(?![-\w/.=(])")


def _of_python(place: str, text: str) -> Iterator[Sentence]:
    documented, messages = set[int](), list[ast.Constant]()
    package, module = place.startswith("src/ppoctl/"), Path(place.removeprefix("src/ppoctl/"))
    for node in nodes()[module] if package else statements(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.add(id(node.value))
            yield from _split(f"{place}:{node.lineno}", "docstring", _without_tables(node.value.value))
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            name = node.name.removeprefix("test_").replace("_", " ")
            yield Sentence(f"{place}:{node.lineno}", "test name", name, is_first=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            messages.append(node)
    for node in messages:
        if id(node) not in documented and len(_WORD.findall(node.value)) >= 3:
            yield from _split(f"{place}:{node.lineno}", "message", node.value)
    yield from _joined(place, list(comments(text)))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node, without their expressions."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


_STRING_OR_COMMENT = re.compile(
    r'''(?s)"""(?:\\.|[^\\])*?"""|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|#[^\n]*'''
)


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the comments of valid Python. `tokenize` finds the same in ten times the time."""
    line, last = 1, 0
    for match in _STRING_OR_COMMENT.finditer(text):
        if match[0].startswith("#"):
            line, last = line + text.count("\n", last, match.start()), match.start()
            yield line, match[0].lstrip("# ")


def _without_tables(docstring: str) -> str:
    """A docstring without indented blocks, and without the lines that begin with a field such as `Formula:`."""
    field = re.compile(r"\s{8,}|\s*[A-Z][a-z]+( [a-z]+){0,2}: ")
    paragraphs = [line for line in docstring.splitlines() if not field.match(line)]
    return "\n".join(paragraphs)


def _joined(place: str, lines: list[tuple[int, str]]) -> Iterator[Sentence]:
    """Comments in lines that follow each other are one text."""
    begin, last, text = 0, -1, ""
    for number, line in [*lines, (-1, "")]:
        if number != last + 1:
            if text:
                yield from _split(f"{place}:{begin}", "comment", text)
            begin, text = number, ""
        text, last = f"{text} {line}".strip(), number


def _of_page(place: str, text: str) -> Iterator[Sentence]:
    """Paragraphs, headings, list items and table cells; no code blocks."""
    text = re.sub(r"(?ms)^(?:```|~~~).*?^(?:```|~~~)|^    \S.*?$", "", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|#|\|) )|\|", text):
        yield from _split(place, "page", block)


def _split(place: str, kind: str, text: str) -> Iterator[Sentence]:
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|cf)\.", r"\1", text)
    text = re.sub(r"(?s)`+[^`]*`+", "X", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("*", "")
    for index, sentence in enumerate(re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", " ".join(text.split()))):
        if sentence.count(" ") >= 1:
            yield Sentence(place, kind, sentence, is_first=index == 0)
