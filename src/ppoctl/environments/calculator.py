"""Exact arithmetic for the tool `calculator`. It never evaluates Python code, and limits the size of each number, so
that no expression takes long. Imports only the standard library."""

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

_MAX_CHARS = 1000
_MAX_BITS = 4096
"""Maximum size of the numerator and denominator of each intermediate result; 4096 bits are 1,233 digits."""
_MAX_EXPONENT = 1000
"""Maximum exponent of a number such as `2e9`."""
_MAX_DECIMALS = 30
"""Maximum number of decimal places of an exact result."""
_ROUNDED = Context(prec=12, Emax=10**9, Emin=-(10**9))
"""Rounding of a result without an exact decimal form."""
_SPELLINGS = str.maketrans({"^": "**", "\u00d7": "*", "\u00f7": "/", "\u2212": "-"})


def calculator(expression: str) -> str:
    """Compute an arithmetic expression exactly. It may contain numbers, parentheses, + - * / // % and ** (power).
    / divides exactly, // rounds down, % is the remainder of //."""
    try:
        return _as_text(_value(_parsed(expression), expression.translate(_SPELLINGS).strip()))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"`{expression[:100]}` is not an arithmetic expression") from None


def _parsed(expression: str) -> ast.expr:
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has more than {_MAX_CHARS} characters")
    return ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval").body


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float()):
            return _bounded(_decimal(ast.get_source_segment(source, node) or ""))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, source), _value(right, source))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(operation)](_value(left, source), _value(right, source))))
        case _:
            pass
    raise ValueError(f"`{ast.unparse(node)[:100]}` is not allowed: use numbers, parentheses, + - * / // % **")


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _decimal(text: str) -> Fraction:
    """Return the exact value of a number with a point or an exponent."""
    _, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent)) > _MAX_EXPONENT:
        raise ValueError(f"the exponent of `{text}` is larger than {_MAX_EXPONENT}")
    return Fraction(text.replace("_", ""))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError(f"the exponent `{_as_text(exponent)}` is not a whole number")
    if _bits(base) * abs(exponent.numerator) > _MAX_BITS and base not in (0, 1, -1):
        raise _too_large()
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > _MAX_BITS:
        raise _too_large()
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _too_large() -> ValueError:
    return ValueError(f"a number of this expression has more than {_MAX_BITS} bits")


def _as_text(value: Fraction) -> str:
    """Return a whole number, an exact decimal number, or, if it has more than `_MAX_DECIMALS` places, 12 significant
    digits."""
    places = next((n for n in range(_MAX_DECIMALS + 1) if 10**n % value.denominator == 0), None)
    if places is None:
        return str(_ROUNDED.divide(Decimal(value.numerator), Decimal(value.denominator)))
    digits = str(abs(value.numerator) * 10**places // value.denominator).zfill(places + 1)
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else f"{sign}{digits}"
