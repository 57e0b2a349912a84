"""Metadata in the file of a record. Imports only the standard library, so that reading metadata requires no torch."""

import json
from typing import Any

KEY = "ppoctl"
"""Name of the header entry of ppoctl, or of the tensor that contains it if it is too long for a header."""


def record_metadata(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and metadata from the bytes of a record file. Raises ValueError if they are not a record file."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start])
        text = header.get("__metadata__", {}).get(KEY)
        if text is None:
            begin, end = header[KEY]["data_offsets"]
            text = data[start + begin : start + end]
        entry = json.loads(text)
        return str(entry["kind"]), dict(entry["meta"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("not a record file") from error
