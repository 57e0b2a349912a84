r"""Numbers as people and models write them, in the spelling that graders read. Scorer processes import this module,
so it imports only the standard library.

    U+2212 5, U+FF0D 5, U+2013 5       -5             a minus sign; between two numbers, a blank follows it
    U+FF11 U+FF12, 1 U+202F 000        12, 1000       fullwidth digits; thousands separated by narrow blanks
    1\,000, 1{,}000                    1000           thousands in LaTeX
    1e5, 1.5 U+00D7 10^3               100000, 1500   exponents, up to two digits
    3 1/2, 3 U+00BD                    7/2            mixed numbers
    10 U+00B2                          10^2           superscript digits

Without this step, `1e5` is read as 1 or 5, and a number after U+2212 loses its sign.
"""

import re
import unicodedata
from decimal import Decimal

_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_CHARACTERS = str.maketrans(
    {chr(0xFEE0 + ord(sign)): sign for sign in "0123456789+.,%/()="} | {"\ufe63": "\u2212", "\uff0d": "\u2212"}
)
"""Fullwidth characters, and other forms of the minus sign U+2212."""
_TEX_BLANK = r"(?:(?:\\[,;:! ]|,\\!|\{\\?,\}|~) ?)+"
_GROUPS = re.compile(
    rf"(?<![\w.,])[0-9]{{1,3}}(?:(?:[ \u2009\u202f\u00a0\u2007'\u2019]|{_TEX_BLANK})[0-9]{{3}})+(?![0-9])"
)
"""Groups of three digits, separated by blanks or apostrophes, also in LaTeX."""
_NOT_ONE = re.compile(
    rf"[0-9]\s*{_TEX_BLANK}\s*\.?[0-9]"  # 3\,4
    r"|[0-9]\.[0-9]+\.[0-9]|(?<![0-9.])[0-9]{1,3}\.[0-9]{3},[0-9]"  # 1.000.000 and 1.000,5
    r"|(?<![\w.])0(?:[xX][0-9A-Fa-f]|[bBoO][0-9])"  # 0x1F
    r"|(?<![0-9.])[0-9]+([-/])[0-9]+\1[0-9]+(?![0-9.])"  # 2024-01-05
)
_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}")
_VULGAR = re.compile("([0-9]?)([\u00bc-\u00be\u2150-\u215e])")
_SUPERSCRIPT = re.compile(f"(\u207b?)([{_SUPERSCRIPTS}]+)")
_MINUS = re.compile(
    r"(?P<before>[0-9)\]}]\s*|[A-Za-z])?(?P<sign>[" + "\u2212\u2013\u2014" + r"])(?P<blank>\s*)(?=\\?\$?\.?[0-9])"
)
_VARIABLE = re.compile(r"(?<![A-Za-z])[A-Za-z]\s*$")
_NUMBER = r"(?<![\w.,])(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_SCIENTIFIC = re.compile(_NUMBER + r"[eE](?P<exponent>[+-]?[0-9]{1,2})(?![\w.]*[0-9])")
_TIMES_POWER = re.compile(
    _NUMBER + r"\s*(?:[xX*" + "\u00d7\u00b7\u22c5" + r"]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*"
    r"(?:\{(?P<braced>-?[0-9]{1,2})\}|(?P<exponent>-?[0-9]{1,2}))(?![0-9.]*[0-9])"
)
_MIXED = re.compile(r"(?<![\w.,/^}])(?P<whole>[0-9]+) (?P<upper>[0-9]+)/(?P<lower>[0-9]+)(?![/.,]?[0-9])")


def in_ascii(text: str) -> str:
    """Return the text with its numbers in ASCII digits, without exponents and mixed fractions. Text without such
    numbers is returned unchanged."""
    if not text.isascii():
        text = _VULGAR.sub(_as_fraction, text.translate(_CHARACTERS))
        text = _MINUS.sub(_as_hyphen, _SUPERSCRIPT.sub(_as_power, text))
    text = joined(text)
    text = _TIMES_POWER.sub(_as_decimal, _SCIENTIFIC.sub(_as_decimal, text))
    return _MIXED.sub(_as_improper, text)


def joined(text: str) -> str:
    """Return the text with thousands in ASCII digits without separators, except commas."""
    return _GROUPS.sub(_as_one_number, text)


def require_numbers(text: str) -> None:
    """Raise ValueError if an answer has digits that a parser of formulas would multiply or subtract, although they
    may be one number, one date or one version."""
    if _NOT_ONE.search(_TEXT.sub("", in_ascii(text))):
        raise ValueError(f"the ground truth `{text[:80]}` would be read as several numbers")


def _as_fraction(found: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", found[2]).replace("\u2044", "/")
    return f"{found[1]} {fraction}" if found[1] else fraction


def _as_power(found: re.Match[str]) -> str:
    digits = "".join(str(_SUPERSCRIPTS.index(digit)) for digit in found[2])
    sign = "-" if found[1] else ""
    return f"^{{{sign}{digits}}}" if sign or len(digits) > 1 else f"^{digits}"


def _as_hyphen(found: re.Match[str]) -> str:
    """Return a sign as `-5`, and a subtraction as `10 - 5`, whose last number is 5. A dash is a sign only if no blank
    follows it, and not if it is between two numbers, as in a range."""
    before, sign = found["before"] or "", found["sign"]
    if sign != "\u2212" and (before or found["blank"]):
        return found.group()
    earlier = found.string[max(found.start("sign") - 8, 0) : found.start("sign")]
    is_after_variable = found["blank"] and _VARIABLE.search(earlier)
    return f"{before}- " if before or is_after_variable else "-"


def _as_one_number(found: re.Match[str]) -> str:
    """Return the digits without separators. Blanks of full width separate thousands only if a group begins with 0, or
    if the text has nothing else: `1 234` may be two numbers."""
    number = re.sub(_TEX_BLANK, "", found.group())
    is_alone = found.string.strip() == found.group()
    return re.sub("[^0-9]", "", number) if " " not in number or " 0" in number or is_alone else number


def _as_decimal(found: re.Match[str]) -> str:
    groups = found.groupdict()
    exponent = int(groups.get("braced") or groups["exponent"])
    return f"{Decimal(groups['number'].replace(',', '')).scaleb(exponent):f}"


def _as_improper(found: re.Match[str]) -> str:
    whole, upper, lower = int(found["whole"]), int(found["upper"]), int(found["lower"])
    return f"{whole * lower + upper}/{lower}" if upper < lower else found.group()
