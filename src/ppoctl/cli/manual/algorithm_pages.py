"""Generated pages docs/algorithms.md and docs/coming-from.md: `make docs` writes them, and a test compares them."""

from collections.abc import Iterable, Sequence
from textwrap import wrap

from ppoctl.cli.manual.features import SECTIONS, Feature, FeatureKey, features
from ppoctl.cli.manual.keys import REQUIRED, KeyLine
from ppoctl.recipe.docstring_fields import DocstringFields
from ppoctl.recipe.key_mappings import System, systems, translation

HEAD = """# Algorithms

For users who choose the settings of the algorithm, or compare a run with a paper or another system. Each entry has
the effect of a setting, its formula and source, the systems that have the same default, and the metrics that show
its effect. In a terminal:

    ppoctl recipes keys ppo.kl                   # an entry with its keys, for any key or table
    ppoctl recipes metrics policy/clip_frac      # a metric: how to read it, and the settings that affect it
    ppoctl recipes coming-from verl              # the keys of another system and their replacement (coming-from.md)

The entries are in the order of processing: generation, reward, advantages, losses, schedules. An entry
named `KEY = "value"` describes one value of the key; an entry named `TABLE by KEY` describes the form of the table
that contains KEY. A key with the default `absent` may be left out; its row describes what happens then. `make docs`
generates this page from the docstrings of the tables in `src/ppoctl`.

Formulas use the names of keys, and these symbols:

- `A` is an advantage; `r` is a reward, or the ratio in a loss; `V` is a value; `G` is a return.
- `logp` is the log-prob of a token under the current actor, `old` under the actor at the start of the step, `ref`
  under the reference; `sampler` is the log-prob that the engine returned.

"""

ESTIMATORS_HEAD = """All estimators, with their names in other systems. `s` is the score of a response after reward
shaping, and `n` the number of scores in a group. The last column is the advantage of the responses to a prompt if all
of them have the same score; "scaled" means divided by the standard deviation of the step.
"""

_SYSTEMS = ("verl", "NeMo-RL", "OpenRLHF", "TRL")

FOREIGN_HEAD = """# Coming from another system

Keys of other systems, the ppoctl keys that replace them, and the differences and pitfalls. If a recipe contains a key
of another system, the error quotes the row of this key. A complete configuration can therefore be pasted as TOML:
`ppoctl validate` lists the replacement of each of its keys. For a key that is not on this page, the error may suggest
the most similar key. Defaults are those of the named versions. `make docs` generates this page from
`src/ppoctl/recipe/other_systems`. In a terminal, `ppoctl recipes coming-from SYSTEM` prints the table of one system.

A default that your configuration does not write differs silently. This recipe contains the defaults of verl, NeMo-RL
or TRL that differ from ppoctl's, each with the file that sets it; the second recipe of a command replaces its values:

    ppoctl recipes coming-from verl --defaults --algorithm grpo > verl.toml
    ppoctl validate verl.toml my.toml

The meaning of ppoctl's keys: [algorithms.md](algorithms.md).

Differences from every other system:

- An unknown key is an error.
- A step that was killed continues within the step, with bitwise equal results. A resume also restores the coefficient
  of an adaptive KL, the moments of rewards and the random seeds.
- Both losses are divided by counts of the whole minibatch, so the split into microbatches or ranks does not change a
  gradient.
- Weights & Biases, SwanLab and images are not offered.
"""


def rendered_rows(feature: Feature, prefix: str = "") -> list[tuple[str, str]]:
    """Return the labelled lines of an entry: its prose (without label), formula, source, defaults and metrics.

    They are followed by one line for each key at or below `prefix` whose docstring has such fields.
    """
    lines = [("", feature.docstring.prose), *_labelled(feature.docstring)]
    for key in feature.keys:
        fields = "; ".join(f"{label}: {text.rstrip('.')}" for label, text in _labelled(key.docstring))
        if fields and any(f"{name}.".startswith(f"{prefix}.") or not prefix for name in key.names):
            lines.append((key.names[0].rpartition(".")[2], fields))
    return lines


def _labelled(docstring: DocstringFields) -> list[tuple[str, str]]:
    fields = {
        "formula": docstring.formula,
        "source": docstring.source,
        "default of": docstring.default_of,
        "shows in": ", ".join(docstring.metrics),
        "other names": "; ".join(" ".join(entry) for entry in docstring.other_names),
        "equal scores": docstring.equal_scores,
    }
    return [(label, text) for label, text in fields.items() if text]


def algorithms() -> str:
    """Return the page docs/algorithms.md."""
    entries = features()
    lines = [HEAD + "| section | decision | keys |", "|---|---|---|"]
    for section in SECTIONS:
        anchor = "".join(char for char in section.title.lower() if char.isalnum() or char == " ").replace(" ", "-")
        keys = _alternatives(name for feature in entries if feature.section is section for name in feature.names)
        lines.append(cells(f"[{section.title}](#{anchor})", section.decides, keys))
    for section in SECTIONS:
        lines.append(f"\n## {section.title}")
        lines += _estimators([feature for feature in entries if feature.section is section])
        for feature in entries:
            if feature.section is section:
                lines += _feature(feature)
    return "\n".join(lines) + "\n"


def _estimators(entries: Sequence[Feature]) -> list[str]:
    """Return a table of the entries that are advantage estimators; no lines if none of the entries is one."""
    rows = []
    for feature in entries:
        docstring, names = feature.docstring, dict(feature.docstring.other_names)
        if docstring.equal_scores:
            kind = feature.names[0].rpartition(" = ")[2].strip('"')
            formulas = coded(filter(None, docstring.formula.split("; ")), separator=" <br>")
            elsewhere = [names.get(system, "") for system in _SYSTEMS]
            rows.append(cells(f"`{kind}`", formulas, docstring.source, *elsewhere, docstring.equal_scores))
    if not rows:
        return []
    head = ("kind", "formula", "source", *(f"in {system}" for system in _SYSTEMS), "equal scores")
    return ["", ESTIMATORS_HEAD, cells(*head), "|" + "---|" * len(head), *rows]


def _alternatives(names: Iterable[str]) -> str:
    """Return the keys of some entries without duplicates, each followed by its alternatives."""
    values: dict[str, list[str]] = {}
    for name in names:
        key, _, value = name.partition(" by ")[0].partition(" = ")
        values.setdefault(key, []).extend([value.strip('"')] if value else [])
    return ", ".join(f"`{key}`" + (f" ({', '.join(names)})" if names else "") for key, names in values.items())


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
        lines += [f"Value: {_allowed(line)}; {usual}."]
    elif feature.keys:
        lines += ([""] if lines[-1] else []) + ["| key | default | value | meaning |", "|---|---|---|---|"]
        lines += [_row(key) for key in feature.keys]
    return lines if lines[-1] else lines[:-1]


def _sentences(docstring: DocstringFields) -> list[str]:
    """Return source, systems with the same default, and related metrics, one sentence each."""
    fields = {"Source": docstring.source, "Default of": docstring.default_of, "Shows in": coded(docstring.metrics)}
    return [f"{label}: {text.rstrip('.')}." for label, text in fields.items() if text]


def _row(key: FeatureKey) -> str:
    meaning = " ".join([key.line.meaning, *_sentences(key.docstring)])
    return cells(coded(key.names), f"`{key.line.default}`", _allowed(key.line), meaning)


def _allowed(line: KeyLine) -> str:
    return ", ".join(filter(None, (line.type, line.range)))


def coming_from(names: Sequence[str] = ()) -> str:
    """Return the page docs/coming-from.md, or only the tables of the named systems."""
    lines = [] if names else [FOREIGN_HEAD]
    for system in systems():
        if names and system.name not in names:
            continue
        lines += [f"## {system.name}\n", f"Version: {system.version}. {system.about}\n"]
        lines += ["| key | in ppoctl | note |", "|---|---|---|"]
        for row in system.rows:
            note = "; ".join(filter(None, (translation(row.values), row.note)))
            lines.append(cells(coded(row.theirs), coded(row.ours_of_all) or "none", note))
        lines.append("")
        if system.unused:
            lines += [
                "Keys without a meaning in ppoctl (`*` stands for any text):\n",
                "| key | reason |",
                "|---|---|",
            ]
            lines += [cells(coded(unused.keys), unused.why) for unused in system.unused]
            lines.append("")
    return "\n".join(lines)


def defaults_of(system: System, algorithm: str) -> str:
    """Return a recipe with the defaults of another system that differ from ppoctl's, to put before one's own recipe.

    `algorithm` is `ppo` or `grpo`. The defaults of the system must be listed.
    """
    assert system.defaults is not None
    name = system.name.lower()
    command = " ".join(("ppoctl recipes coming-from", name, "--defaults --algorithm", algorithm))
    lines = [
        f"# Defaults of {system.name} ({algorithm.upper()}) that differ from ppoctl's: those that change results, or",
        f"# what an evaluation does. Read from commit {system.defaults.commit}. Your own recipe replaces them:",
        "#",
        f"#     {command} > {name}.toml",
        f"#     ppoctl train {name}.toml my.toml",
        "#",
        *wrap(f"Not here: {system.defaults.left_out}.", 118, initial_indent="# ", subsequent_indent="# "),
    ]
    for default in system.defaults.of[algorithm]:
        lines += ["", f"# {default.theirs}: {default.value} ({default.file})", *default.ours]
    return "\n".join(lines) + "\n"


def coded(names: Iterable[str], separator: str = ", ") -> str:
    """Return the names as inline code, separated by commas or another separator."""
    return separator.join(f"`{name}`" for name in names)


def cells(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
