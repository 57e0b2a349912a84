"""Seeds: every random seed is a hash of the run's seed and of the seed's purpose, so no state of a random-number
generator is saved."""

import hashlib


def derive_seed(*parts: object) -> int:
    """Return a 62-bit seed from its parts, for example (run seed, step, "rollout", prompt id, sample index)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2
