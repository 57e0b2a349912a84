"""Lineage: the inputs that a state was computed from. States with equal lineage count as the same state, even if a
replay is not bit-equal."""

import hashlib
from collections.abc import Sequence

from ppoctl.core.batch.records import State


def initial_state(role: str, source_digest: str) -> State:
    """Return the initial state of every run: the unchanged model source."""
    return State(role=role, step=0, updates=0, lineage=_hash("source", role, source_digest))


def next_lineage(parent: State, inputs: Sequence[str], fingerprint: str) -> str:
    """Return the lineage after an update of `parent` that read `inputs` (identities) under `fingerprint`."""
    return _hash("update", parent.lineage, fingerprint, *inputs)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
