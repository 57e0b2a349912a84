"""Lineage: what a state was made from. Equal lineage is the same state, also where a repetition is not bit-equal."""

import hashlib
from collections.abc import Sequence

from ppoctl.batch.records import State


def initial_state(role: str, source_digest: str) -> State:
    """The state every run starts from: model source, untouched."""
    return State(role=role, step=0, updates=0, lineage=_hash("source", role, source_digest))


def next_lineage(parent: State, inputs: Sequence[str], fingerprint: str) -> str:
    """Lineage after an update of `parent` that read `inputs` (identities) under `fingerprint`."""
    return _hash("update", parent.lineage, fingerprint, *inputs)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
