"""The rules by which `mutants_by_rule` breaks a file; each stands for one kind of mistake between recipe and loss.

default     a key of the recipe is not read: its default is used (without a default: 1, or another choice)
exchange    two arguments of one type are exchanged
pair        two values that are returned or assigned together are exchanged
metric      a metric, or another entry of a record, is the next one of its kind
sign        plus for minus, times for divided by, and the reverse; a minus is lost
bound       less for less-or-equal, equal for not equal; a constant changes; max for min
condition   a condition is inverted; one half of an `and` or `or` is ignored
mask        a mask is not applied, or is everything, or half of it
row         rows of a minibatch are the first ones; the first is the last
seed        a part of a seed is omitted
flag        True for False (not the `strict` of a zip, which is a guard without effect on results)
"""

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from ppoctl.core.recipe_table import Effect
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

Change = tuple[ast.AST, str]
"""A node and the source that replaces it."""
Rule = Callable[[ast.Module, "Names"], Iterator[Change]]
Names = dict[str, Any]
"""Meaning of the names in the file."""


@dataclass(frozen=True)
class Found:
    """One defect."""

    rule: str
    file: str
    words: str
    """File, function, rule, and the change: one line, stable while the code is unchanged."""
    text: str
    """The complete file with the defect in it."""


def mutants_of(package: Path, file: str) -> Iterator[Found]:
    """Yield every mutant of a file, by rule, in the order of the file."""
    source = (package / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    names = vars(importlib.import_module("ppoctl." + file.removesuffix(".py").replace("/", ".")))
    blocked = {id(node) for outer in _unread(tree) for node in ast.walk(outer)}
    seen: set[str] = set()
    for name, rule in RULES.items():
        for node, new in rule(tree, names):
            old = ast.get_source_segment(source, node)
            if id(node) in blocked or old is None or _same(old, new):
                continue
            text = _replaced(source, node, new)
            if text in seen:
                continue
            seen.add(text)
            words = f"{file} {_place(tree, node)}: {name}: {_shown(old, new)}"
            count = sum(found.startswith(words) for found in seen)
            seen.add(words + "#" * count)
            yield Found(name, file, words + (f" ({count + 1})" if count else ""), text)


def _unread(tree: ast.Module) -> Iterator[ast.AST]:
    """Return nodes without effect on results: annotations, docstrings, error messages, constants for speed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.annotation
            if isinstance(node.annotation, ast.Subscript) and ast.unparse(node.annotation).startswith("ClassVar[str"):
                yield node
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.annotation
        if isinstance(node, ast.FunctionDef):
            yield from [node.returns] if node.returns is not None else []
            yield from node.decorator_list
        if isinstance(node, ast.ClassDef):
            yield from node.decorator_list
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            yield node
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
            "CHUNK_TOKENS",
            "RECORDS",
        ):
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_require", "Field", "field", "cast"):
            yield from node.args[1:]


def key_defaults() -> dict[str, list[str]]:
    """Return attribute of each result key -> its defaults, as source."""
    found: dict[str, list[str]] = {}
    for _, key in tree.walk(tree.of(Recipe)):
        if key.effect is Effect.RESULTS:
            default = key.field.default if not key.required else 1
            source = repr(default)
            if source not in found.setdefault(key.attribute, []):
                found[key.attribute].append(source)
    return found


def default(tree: ast.Module, names: Names) -> Iterator[Change]:
    if "Recipe" not in names:
        return
    defaults = key_defaults()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in defaults:
            if ast.unparse(node.value).split(".")[0] in ("self", "constant"):
                continue
            yield from ((node, source) for source in defaults[node.attr])
        if isinstance(node, ast.Attribute) and node.attr in ("steps", "critic_only_steps", "samples_per_prompt"):
            yield node, "1"


def exchange(tree: ast.Module, names: Names) -> Iterator[Change]:
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        values = [*call.args, *(word.value for word in call.keywords)]
        types = _types(call, names)
        for one, other in combinations(range(len(values) if types else 0), 2):
            if types[one] == types[other] and types[one] != "?":
                yield call, _exchanged(call, values[one], values[other])


def _types(call: ast.Call, names: Names) -> list[str]:
    """Return the annotation of each argument if the callee is one of ppoctl's; otherwise none."""
    head, *rest = ast.unparse(call.func).split(".")
    callee = names.get(head)
    for part in rest:
        callee = getattr(callee, part, None)
    if not callable(callee) or not str(getattr(callee, "__module__", "")).startswith("ppoctl"):
        return []
    try:
        bound = inspect.signature(callee).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    except (ValueError, TypeError):
        return []
    by_value = {id(value): parameter for parameter, value in bound.arguments.items()}
    parameters = inspect.signature(callee).parameters
    values = [*call.args, *(word.value for word in call.keywords)]
    return [str(parameters[by_value[id(value)]].annotation) if id(value) in by_value else "?" for value in values]


def _exchanged(node: ast.AST, one: ast.AST, other: ast.AST) -> str:
    class Exchange(ast.NodeTransformer):
        def visit(self, here: ast.AST) -> Any:
            if here is one:
                return other
            return one if here is other else self.generic_visit(here)

    copied = ast.parse(ast.unparse(node), mode="eval").body
    twins = dict(zip(map(id, ast.walk(node)), ast.walk(copied), strict=False))
    one, other = twins.get(id(one), one), twins.get(id(other), other)
    return ast.unparse(Exchange().visit(copied))


def pair(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        is_unpacked = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if (is_unpacked or isinstance(node, ast.Return)) and isinstance(node.value, ast.Tuple):
            for one, other in combinations(node.value.elts, 2):
                yield node.value, _exchanged(node.value, one, other)


def metric(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and len(node.values) > 1:
            yield from ((one, ast.unparse(other)) for one, other in pairwise(node.values))
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        stored = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        ]
        yield from ((one.value, ast.unparse(other.value)) for one, other in pairwise(stored))


SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


def sign(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS and not _is_text(node):
            yield node, ast.unparse(ast.BinOp(node.left, SIGNS[type(node.op)](), node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield node, ast.unparse(node.operand)


BOUNDS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
EXTREMES = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}


def bound(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield node, ast.unparse(ast.Compare(node.left, [BOUNDS[type(node.ops[0])]()], node.comparators))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield node, repr(node.value + 1 if isinstance(node.value, int) else 2 * node.value or 1.0)
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func).rpartition("."))[2] in EXTREMES:
            new = ast.Call(
                ast.parse(name[0] + name[1] + EXTREMES[name[2]], mode="eval").body, node.args, node.keywords
            )
            yield node, ast.unparse(new)


def condition(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
            yield node.test, f"not ({ast.unparse(node.test)})"
        if isinstance(node, ast.BoolOp):
            yield from ((node, ast.unparse(value)) for value in node.values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, ast.unparse(node.operand)


def mask(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "torch.where":
                yield node, ast.unparse(node.args[1])
            elif name.endswith(".where"):
                yield node, name.removesuffix(".where")
            for value in [*node.args, *(word.value for word in node.keywords)]:
                if "mask" in ast.unparse(value).rpartition(".")[2] and isinstance(value, ast.Name | ast.Attribute):
                    yield value, f"({ast.unparse(value)} | True)"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
            yield from ((node, ast.unparse(half)) for half in (node.left, node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            yield node, ast.unparse(node.operand)


def row(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        here, at = ast.unparse(node.value), ast.unparse(node.slice)
        if at == "rows" or at.endswith(".rows"):
            yield node, f"{here}[: len({at})]"
        elif isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
            yield node, f"{here}[{-1 - node.slice.value}]"
        elif isinstance(node.slice, ast.UnaryOp):
            yield node, f"{here}[0]"


def seed(tree: ast.Module, _: Names) -> Iterator[Change]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("derive_seed", "_hash"):
            for left_out in node.args:
                kept = [arg for arg in node.args if arg is not left_out]
                yield node, ast.unparse(ast.Call(node.func, kept, node.keywords))
        if isinstance(node, ast.keyword) and node.arg == "seed":
            yield node.value, "0"


def flag(tree: ast.Module, _: Names) -> Iterator[Change]:
    guards = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "strict"}
    for node in ast.walk(tree):
        if id(node) in guards:
            continue
        if isinstance(node, ast.Constant) and type(node.value) is bool:
            yield node, repr(not node.value)


RULES: dict[str, Rule] = {
    "default": default,
    "exchange": exchange,
    "pair": pair,
    "metric": metric,
    "sign": sign,
    "bound": bound,
    "condition": condition,
    "mask": mask,
    "row": row,
    "seed": seed,
    "flag": flag,
}


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", 0), str) for side in sides)


def _place(tree: ast.Module, node: ast.AST) -> str:
    """Return the class and function around it."""
    line = node.lineno  # type: ignore[attr-defined]
    around = [
        outer
        for outer in ast.walk(tree)
        if isinstance(outer, ast.ClassDef | ast.FunctionDef) and outer.lineno <= line <= (outer.end_lineno or 0)
    ]
    return ".".join(outer.name for outer in sorted(around, key=lambda outer: outer.lineno)) or "(file)"


def _replaced(source: str, node: ast.AST, new: str) -> str:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for text in lines:
        starts.append(starts[-1] + len(text))
    begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
    end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
    return f"{source[:begin]}({new}){source[end:]}"


def _same(old: str, new: str) -> bool:
    try:
        return ast.dump(_parsed(old)) == ast.dump(_parsed(new))
    except SyntaxError:
        return False


def _parsed(text: str) -> ast.Expression:
    return ast.parse(f"({text})", mode="eval")  # in parentheses, because a line of the source may begin with `|`


def _shown(old: str, new: str) -> str:
    """Return old and new text, without their common beginning and end."""
    old, new = (" ".join(ast.unparse(_parsed(text)).split()) for text in (old, new))
    begin = _same_letters(old, new)
    end = min(_same_letters(old[::-1], new[::-1]), len(old) - begin, len(new) - begin)
    # Whole words, with some of their context.
    start = old.rfind(" ", 0, max(begin - 12, 0)) + 1
    stops = [text.find(" ", len(text) - end + 8) if end > 8 else -1 for text in (old, new)]
    shown = [text[start : stop if stop > 0 else None] for text, stop in zip((old, new), stops, strict=True)]
    return " -> ".join(f"`{_short(text)}`" for text in shown)


def _same_letters(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:66]} ... {text[-30:]}"
