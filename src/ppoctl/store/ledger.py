"""The sample ledger: one line per sample and step, what it was drawn with and which updates used it.

It holds no clock and no attempt number, so an interrupted and resumed run writes the same bytes as one that was never
interrupted: the oracle of every drill.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ppoctl.batch.records import FINISH_REASONS, REWARD_OUTCOMES, Rewards, Rollouts
from ppoctl.store.artifact import storage_error


class Ledger:
    """Append-only, one block of lines per step, each block written once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_step = self._repair()

    def record(self, step: int, rollouts: Rollouts, rewards: Rewards, used_by: dict[str, str]) -> None:
        """Append the samples of a finished step unless they are there. `used_by`: role -> lineage it led to."""
        if step <= self._last_step:
            return
        lines = sample_lines(step, rollouts, rewards, used_by)
        lines[-1]["end_of_step"] = True
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(json.dumps(line, sort_keys=True).encode("ascii") + b"\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(self._path, error) from error
        self._last_step = step

    def _repair(self) -> int:
        """Cut a block that a kill left unfinished; returns the last step on record."""
        if not self._path.is_file():
            return 0
        data = self._path.read_bytes()
        whole, last_step, position = 0, 0, 0
        for raw in data.split(b"\n")[:-1]:
            position += len(raw) + 1
            line = json.loads(raw)
            if line.get("end_of_step"):
                whole, last_step = position, int(line["step"])
        if whole != len(data):
            with self._path.open("r+b") as file:
                file.truncate(whole)
        return last_step


def sample_lines(step: int, rollouts: Rollouts, rewards: Rewards, used_by: dict[str, str]) -> list[dict[str, Any]]:
    """One JSON-able line per sample, in row order."""
    lines: list[dict[str, Any]] = []
    for row in range(rollouts.num_seqs):
        ids = rollouts.tokens[row, : int(rollouts.lengths[row])].tolist()
        outcome = REWARD_OUTCOMES[int(rewards.outcomes[row])]
        lines.append(
            {
                "step": step,
                "prompt": rollouts.prompt_ids[row],
                "sample": rollouts.sample_indices[row],
                "seed": int(rollouts.seeds[row]),
                "stamp": rollouts.stamps[row],
                "tokens": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:24],
                "finish": FINISH_REASONS[int(rollouts.finish[row])],
                "outcome": outcome,
                "score": float(rewards.scores[row]) if outcome == "ok" else None,
                "used_by": used_by,
            }
        )
    return lines
