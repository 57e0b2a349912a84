"""The sample ledger: one line per sample and step, with the origin of the sample and the updates that used it.

It contains no times and no attempt numbers. A resumed run therefore writes the same bytes as an uninterrupted run,
and fault-injection tests (drills) compare these bytes. If an engine died during a sample, only the
field `sends` shows this. If a step was dropped and then had another result, the new block replaces the old block and
all blocks after it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.core.batch.scores import FINISH_REASONS, REWARD_OUTCOMES
from ppoctl.core.batch.sealed_json import sealed_line, whole_lines
from ppoctl.store.append import GrowingFile, opened, read_whole
from ppoctl.store.attempt import Attempt

if TYPE_CHECKING:
    from ppoctl.core.batch.records import Rewards, Rollouts


class Ledger:
    """Writer of a run's ledger. The newest attempt writes one block of lines for each step, once."""

    def __init__(self, path: Path, attempt: Attempt) -> None:
        self._path = path
        self._attempt = attempt
        self._blocks: dict[int, tuple[int, int]] = {}
        """Start and end offset of the block of each step."""
        self._end = 0
        """Offset up to which the file has been read."""

    def end_of(self, step: int) -> int:
        """Return the size of the file in bytes after this step was recorded.

        The file may be longer at present: if a run repeats earlier steps, it already has later steps.
        """
        return max((end for known, (_, end) in self._blocks.items() if known <= step), default=0)

    def record(self, step: int, samples: "Sequence[tuple[Rollouts, Rewards]]", used_by: dict[str, str]) -> None:
        """Append the samples of a finished step, round by round, unless the ledger already has them.

        From round 2 on, a line has the field `round`: a prompt may occur in several rounds.
        `used_by` maps each role to the lineage of its state after the update.
        """
        count = sum(rollouts.num_seqs for rollouts, _ in samples)
        lines = [
            {"step": step, "of": count, "used_by": used_by, **({"round": number} if number > 1 else {}), **line}
            for number, records in enumerate(samples, start=1)
            for line in _sample_lines(*records)
        ]
        lines[-1]["end_of_step"] = True
        block = b"".join(map(sealed_line, lines))
        with opened(self._path) as file:
            self._catch_up(file)
            start, end = self._blocks.get(step, (self._end, self._end))
            if file.read(start=start)[: end - start] == block:
                return
            self._forget(step)
            is_longer = file.size > self._end
        if is_longer:  # replaced by a copy, not truncated in place: a newer attempt may be copying the file
            self._attempt.renew(self._path, self._end)
        with opened(self._path) as file:
            self._attempt.require_newest()
            file.append(block)
            self._catch_up(file)

    def _forget(self, step: int) -> None:
        """Forget the blocks from this step on.

        The samples of these blocks are from dropped steps, and no current state was trained on them.
        """
        self._end = min((start for known, (start, _) in self._blocks.items() if known >= step), default=self._end)
        self._blocks = {earlier: block for earlier, block in self._blocks.items() if earlier < step}

    def _catch_up(self, file: GrowingFile) -> None:
        """Read the blocks that were appended since the last call; a block that a kill cut short is ignored."""
        if file.size == self._end:
            return
        for line in whole_lines(self._path, file.read(start=self._end), offset=self._end):
            if line.body.get("end_of_step"):
                self._blocks[int(line.body["step"])] = (self._end, line.end)
                self._end = line.end


def end_of_blocks(path: Path) -> int:
    """Return the offset in bytes of the end of a ledger's last finished step.

    Raises CorruptArtifactError naming a damaged line, or the file if it is missing.
    """
    ends = [line.end for line in whole_lines(path, read_whole(path)) if line.body.get("end_of_step")]
    return ends[-1] if ends else 0


def whole_blocks(lines: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the samples of each complete step, in order; `lines` may have gaps from damaged lines."""
    block: list[dict[str, Any]] = []
    for line in lines:
        if block and block[-1]["step"] != line["step"]:
            block = []
        block.append(line)
        if line.get("end_of_step"):
            if len(block) == line["of"]:
                yield block
            block = []


def _segments(rollouts: "Rollouts", row: int) -> dict[str, Any]:
    """Return stamp and number of tokens of each segment of a response that several steps generated."""
    if rollouts.segment_stamps is None or rollouts.segment_tokens is None or len(rollouts.segment_stamps[row]) == 1:
        return {}
    return {"segments": [*zip(rollouts.segment_stamps[row], rollouts.segment_tokens[row], strict=True)]}


def _sample_lines(rollouts: "Rollouts", rewards: "Rewards") -> list[dict[str, Any]]:
    """Return one JSON-serialisable line per sample, in row order."""
    lines: list[dict[str, Any]] = []
    for row in range(rollouts.num_seqs):
        ids = rollouts.tokens[row, : int(rollouts.lengths[row])].tolist()
        outcome = REWARD_OUTCOMES[int(rewards.outcomes[row])]
        lines.append(
            {
                "prompt": rollouts.prompt_ids[row],
                "sample": rollouts.sample_indices[row],
                "seed": int(rollouts.seeds[row]),
                "stamp": rollouts.stamps[row],
                **_segments(rollouts, row),
                "sends": rollouts.sends[row],
                "tokens": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:24],
                "finish": FINISH_REASONS[int(rollouts.finish[row])],
                "outcome": outcome,
                "score": float(rewards.scores[row]) if outcome == "ok" else None,
            }
        )
    return lines
