"""Dotted names of recipe keys."""

import json
import re

KeyPath = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dotted(path: KeyPath) -> str:
    """Return the key path in TOML's spelling: names that are not bare keys are quoted."""
    return ".".join(part if _BARE.fullmatch(part) else quoted_text(part) for part in path)


def quoted_text(text: str) -> str:
    """Return the text as a TOML string. A TOML string differs from a JSON string in two ways: it has no surrogate
    pairs, and DEL must be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
