"""The pages of docs/ that are made of docstrings and tables: `make docs` writes them, a test holds them."""

from collections.abc import Iterable, Sequence

from ppoctl.manual.features import SECTIONS, Feature, FeatureKey, features
from ppoctl.manual.keys import REQUIRED, KeyLine
from ppoctl.recipe.docstring_fields import DocstringFields
from ppoctl.recipe.key_mappings import systems

HEAD = """# Algorithms

For whoever decides how a run learns, or holds it against a paper or another system. Each part says what a setting
does, its formula, where that is from, whose default it is, and which metrics show it at work. On a terminal:

    ppoctl recipes keys ppo.kl                   # a part with its keys; any key or table will do
    ppoctl recipes metrics policy/clip_frac      # a metric: how to read it, and the settings that move it
    ppoctl recipes coming-from verl              # what the keys of another system are here (coming-from.md)

The parts stand in the order of what happens to a token. A part whose name is `KEY = "value"`, or `TABLE by KEY`, is
one of several alternatives. A key with the default `absent` may be left out; its row says what happens then.
`make docs` makes this page of the docstrings in `src/ppoctl/recipe` and `src/ppoctl/rewards`.

Formulas are in the names of keys, and in these:

- `A` is an advantage, `r` a reward, or in a loss the ratio; `V` is a value, `G` a return.
- `logp` is the log-prob of a token under the actor as it is, `old` as it was when the step began, `ref` under the
  reference, `sampler` as the engine said.

"""

FOREIGN_HEAD = """# Coming from another system

Key by key, with what differs and the trap each one had. A recipe that holds a key of another system is refused with
the line that stands here, so a whole configuration may be pasted as TOML: `ppoctl validate` says what each of its
keys is here. A key that this page does not have may get the nearest one as a suggestion. Defaults are those of the
versions named. `make docs` makes this page of `src/ppoctl/recipe/other_systems`; on a terminal:
`ppoctl recipes coming-from SYSTEM`. What the keys of ours mean: [algorithms.md](algorithms.md).

Whatever was brought along: a key that is not known is an error; a step that was killed goes on where it was, with
the same bits; the coefficient of an adaptive KL, the moments of rewards and the seeds of all randomness are part of
what a resume restores; both losses are divided by counts of the whole minibatch, so that no split into microbatches
or ranks changes a gradient. Weights & Biases, TensorBoard, SwanLab and images are not offered.
"""


def rendered_rows(feature: Feature, prefix: str = "") -> list[tuple[str, str]]:
    """What is said of a part, each with the word before it: formula, source, whose default, where it shows; then of
    those of its keys at or below a dotted key that say something of their own."""
    said = [("", feature.docstring.prose), *_marks(feature.docstring)]
    for key in feature.keys:
        marks = "; ".join(f"{word}: {text.rstrip('.')}" for word, text in _marks(key.docstring))
        if marks and any(f"{name}.".startswith(f"{prefix}.") or not prefix for name in key.names):
            said.append((key.names[0].rpartition(".")[2], marks))
    return said


def _marks(said: DocstringFields) -> list[tuple[str, str]]:
    marks = {
        "formula": said.formula,
        "source": said.source,
        "default of": said.default_of,
        "shows in": ", ".join(said.metrics),
    }
    return [(word, text) for word, text in marks.items() if text]


def algorithms() -> str:
    """The page docs/algorithms.md."""
    found = features()
    lines = [HEAD + "| what happens | you decide | keys |", "|---|---|---|"]
    for section in SECTIONS:
        anchor = "".join(char for char in section.title.lower() if char.isalnum() or char == " ").replace(" ", "-")
        keys = _chosen(name for feature in found if feature.section is section for name in feature.names)
        lines.append(cells(f"[{section.title}](#{anchor})", section.decides, keys))
    for section in SECTIONS:
        lines.append(f"\n## {section.title}")
        for feature in found:
            if feature.section is section:
                lines += _feature(feature)
    return "\n".join(lines) + "\n"


def _chosen(names: Iterable[str]) -> str:
    """The keys of some parts, each once, with its alternatives behind it."""
    values: dict[str, list[str]] = {}
    for name in names:
        key, _, value = name.partition(" by ")[0].partition(" = ")
        values.setdefault(key, []).extend([value.strip('"')] if value else [])
    return ", ".join(f"`{key}`" + (f" ({', '.join(said)})" if said else "") for key, said in values.items())


def _feature(feature: Feature) -> list[str]:
    lines = [
        f"\n### {coded(feature.names)}{' (the default)' if feature.is_default else ''}\n",
        feature.docstring.prose,
    ]
    if feature.docstring.formula:
        lines += ["", *(f"    {part}" for part in feature.docstring.formula.split("; "))]
    if feature.docstring.table:
        head, *rows = feature.docstring.table
        lines += ["", cells(*head), "|" + "---|" * len(head), *(cells(*row) for row in rows)]
    lines.append("")
    lines += [f"{text}  " for text in _sentences(feature.docstring)]
    if feature.is_one_key:
        line = feature.keys[0].line
        usual = REQUIRED if line.default == REQUIRED else f"default: `{line.default}`"
        lines += [f"May be: {_allowed(line)}; {usual}."]
    elif feature.keys:
        lines += ([""] if lines[-1] else []) + ["| key | default | may be | what it is |", "|---|---|---|---|"]
        lines += [_row(key) for key in feature.keys]
    return lines if lines[-1] else lines[:-1]


def _sentences(said: DocstringFields) -> list[str]:
    """Source, whose default it is and where it shows, a sentence each."""
    told = {"Source": said.source, "Default of": said.default_of, "Shows in": coded(said.metrics)}
    return [f"{word}: {text.rstrip('.')}." for word, text in told.items() if text]


def _row(key: FeatureKey) -> str:
    says = " ".join([key.line.meaning, *_sentences(key.docstring)])
    return cells(coded(key.names), f"`{key.line.default}`", _allowed(key.line), says)


def _allowed(line: KeyLine) -> str:
    return ", ".join(filter(None, (line.type, line.range)))


def coming_from(names: Sequence[str] = ()) -> str:
    """The page docs/coming-from.md, or the tables of some systems only."""
    lines = [] if names else [FOREIGN_HEAD]
    for system in systems():
        if names and system.name not in names:
            continue
        lines += [f"## {system.name}\n", f"Of version {system.version}. {system.about}\n"]
        lines += ["| there | here | what differs |", "|---|---|---|"]
        lines += [cells(coded(row.theirs), coded(row.ours_of_all) or "nothing", row.note) for row in system.rows]
        lines.append("")
        if system.unused:
            lines += ["Keys without a meaning here (`*` stands for any text):\n", "| there | why |", "|---|---|"]
            lines += [cells(coded(unused.keys), unused.why) for unused in system.unused]
            lines.append("")
    return "\n".join(lines)


def coded(names: Iterable[str]) -> str:
    """The names, each as code, with commas between."""
    return ", ".join(f"`{name}`" for name in names)


def cells(*cells: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
