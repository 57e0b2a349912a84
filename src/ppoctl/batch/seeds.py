"""All randomness is computed: a hash of the run's seed and of where it is used. No generator state is ever saved."""

import hashlib


def derive_seed(*parts: object) -> int:
    """A 62-bit seed from its parts, for instance (run seed, step, "rollout", prompt id, sample index)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 2
