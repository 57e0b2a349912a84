"""Metadata in the file of a record. This module imports only the standard library, so reading metadata does not
require torch."""

import json
from typing import Any

KEY = "ppoctl"
"""Name of ppoctl's entry in the header, or of the tensor that contains the entry if it is too long for a header."""


def record_metadata(data: bytes) -> tuple[str, dict[str, Any]]:
    """Return kind and metadata from the bytes of a record file. Raises ValueError if the bytes are not a record
    file."""
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
