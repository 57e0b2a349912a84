"""What the file of a record says of itself beside its tensors. Light: whoever only reads needs no torch for it."""

import json
from typing import Any

KEY = "ppoctl"
"""The header's one entry that is ours, or the tensor that holds it where it is too long for a header."""


def record_metadata(data: bytes) -> tuple[str, dict[str, Any]]:
    """Kind and metadata in the bytes of a record's file. Raises ValueError on anything that is no such file."""
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:start])
        text = header.get("__metadata__", {}).get(KEY)
        if text is None:
            begin, end = header[KEY]["data_offsets"]
            text = data[start + begin : start + end]
        found = json.loads(text)
        return str(found["kind"]), dict(found["meta"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("not a record file") from error
