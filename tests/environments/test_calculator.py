"""The calculator is exact, and no expression takes long."""

import random
import time
import tracemalloc
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest

from ppoctl.environments.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2+3*4", "14"),
        (" (2 + 3) * -4 ", "-20"),
        ("0.1 + 0.2", "0.3"),
        ("1_000.50*2", "2001"),
        ("7/8", "0.875"),
        ("-1/8", "-0.125"),
        ("1/3", "0.333333333333"),
        ("200/3", "66.6666666667"),
        ("-7//2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2**10", "1024"),
        ("-2^2", "-4"),
        ("2**-3", "0.125"),
        ("12 \u00d7 3 \u00f7 4 \u2212 1", "8"),
        ("123456789123456789 * 987654321987654321", "121932631356500531347203169112635269"),
        ("1.5e3 + 1", "1501"),
        ("1e-30", "0.000000000000000000000000000001"),
        ("1e-31", "1E-31"),
        ("0x10", "16"),
        ("0**0", "1"),
        ("1**9999999999999", "1"),
        ("1**-9999999999999", "1"),
        ("(-1)**9999999999999", "-1"),
        ("(-1)**-9999999999998", "1"),
        ("(1-2)**(10**1000)", "1"),
        ("0**9999999999999", "0"),
        ("1e1000 / 1e999", "10"),
        ("1e-1000", "1E-1000"),
        ("2**2048 / 2**2047", "2"),
        ("2**-2048 * 2**2047", "0.5"),
        ("2**2047 * 2**2048 // 2**2047 // 2**2047", "2"),
        ("7" + " " * 999, "7"),
    ],
)
def test_calculator_computes(expression: str, result: str) -> None:
    assert calculator(expression) == result


def test_calculator_agrees_with_fractions() -> None:
    """The oracle evaluates the text with Fraction objects in place of the numbers."""
    generator = random.Random(5)
    for _ in range(300):
        text, exact = _expression(generator, depth=4)
        try:
            value = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(ValueError, match="division by zero"):
                calculator(text)
            continue
        with localcontext(prec=12):
            rounded = Decimal(value.numerator) / Decimal(value.denominator)
        found = calculator(text)
        assert Fraction(found) == value or Decimal(found) == rounded, text


def _expression(generator: random.Random, *, depth: int) -> tuple[str, str]:
    """Return a random expression, and the same expression with Fractions as numbers."""
    if depth == 0 or generator.random() < 0.2:
        number = generator.choice([str(generator.randrange(50)), f"{generator.random() * 20:.3f}"])
        return number, f"Fraction('{number}')"
    sides = [_expression(generator, depth=depth - 1) for _ in range(2)]
    operation = generator.choice(["+", "-", "*", "/", "//", "%"])
    text, exact = (f"({one} {operation} -{other})" for one, other in zip(*sides, strict=True))
    return text, f"Fraction{exact}"


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("9**9**9", "has more than 4096 bits"),
        ("10**100000000", "has more than 4096 bits"),
        ("2**-100000000", "has more than 4096 bits"),
        ("(1/3)**100000000", "has more than 4096 bits"),
        ("(1/10**300)**100000000", "has more than 4096 bits"),
        ("1.5**-100000000", "has more than 4096 bits"),
        ("2**(10**1000)", "has more than 4096 bits"),
        ("2**2049", "has more than 4096 bits"),
        ("2**-2049", "has more than 4096 bits"),
        ("2**2048 * 2**2048", "has more than 4096 bits"),
        ("1e1000 * 1e1000", "has more than 4096 bits"),
        ("1e-1000 * 1e-1000", "has more than 4096 bits"),
        ("1e1000 // 1e-1000", "has more than 4096 bits"),
        ("1e1000 - 1e-1000", "has more than 4096 bits"),
        ("1e1000 % 1e-1000 + 1e1000 + 1e-1000", "has more than 4096 bits"),
        ("9" * 500 + ".5e900", "has more than 4096 bits"),
        ("1e999999999999", "the exponent of `1e999999999999` is larger than 1000"),
        ("1e1001", "the exponent of `1e1001` is larger than 1000"),
        ("1e-1001", "the exponent of `1e-1001` is larger than 1000"),
        ("1e-999999999999", "the exponent of `1e-999999999999` is larger than 1000"),
        ("2**4000*2**4000", "has more than 4096 bits"),
        ("(" * 400 + "1" + ")" * 400, "is not an arithmetic expression"),
        ("-" * 999 + "1", "is not an arithmetic expression"),
        ("1+" * 600 + "1", "more than 1000 characters"),
        ("7" + " " * 1000, "more than 1000 characters"),
        ("2**0.5", "the exponent `0.5` is not a whole number"),
        ("1/(2-2)", "division by zero"),
        ("0**-1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("", "is not an arithmetic expression"),
        ("2 +", "is not an arithmetic expression"),
        ("1,000 + 2", "is not allowed: use numbers"),
        ("__import__('os').getpid()", "is not allowed: use numbers"),
        ("True + 1", "`True` is not allowed"),
        ("2j", "`2j` is not allowed"),
        ("1 if 1 else 2", "is not allowed"),
        ("1 << 999999999", "is not allowed"),
        ("'a' * 999999999", "is not allowed"),
        ("1\x00", "."),
        ("\ud800", "."),
    ],
)
def test_unusable_expression_is_explained_with_little_time_and_memory(expression: str, says: str) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=says):
            calculator(expression)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 1
