"""Log of the episodes of an unfinished stage, kept after a crash: the `EpisodeLog` port on a run directory.

Each attempt appends to a file of its own, one line with a checksum per event, so a superseded attempt never writes
into the file of a newer one. An event that a newer attempt recorded replaces the event of an older attempt and all
that followed it in its episode. A damaged line and all later events of its episode are ignored: the turns are then
generated again. `store.stage_runner` removes the folder when the stage is committed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.core.ports import EpisodeEntry, SampleSetKey
from ppoctl.store.append import intact, opened
from ppoctl.store.attempt import Attempt
from ppoctl.store.run_paths import RunPaths

PREFIX, SUFFIX = "episodes-", ".jsonl"


@dataclass(frozen=True)
class EpisodeLogFiles:
    """Files `episodes-ATTEMPT.jsonl` in `steps/N/10-rollout.parts/`, and in the same folder of other generating
    stages."""

    paths: RunPaths
    attempt: Attempt

    def load(self, key: SampleSetKey) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        folder = self.paths.parts(key.step, key.stage)
        recorded: dict[str, list[Mapping[str, Any]]] = {}
        files = folder.glob(f"{PREFIX}*{SUFFIX}") if folder.is_dir() else ()
        for path in sorted(files, key=lambda path: int(path.stem.removeprefix(PREFIX))):
            for line in intact(path):
                events = recorded.setdefault(line["episode"], [])
                if line["set"] == key.fingerprint and line["number"] <= len(events):
                    events[line["number"] :] = [line["event"]]
        return recorded

    def append(self, key: SampleSetKey, entries: Sequence[EpisodeEntry]) -> None:
        if not entries:
            return
        path = self.paths.parts(key.step, key.stage) / f"{PREFIX}{self.attempt.number}{SUFFIX}"
        if not path.exists():
            self.attempt.write(path, b"")
        lines = (
            {"set": key.fingerprint, "episode": entry.key, "number": entry.number, "event": entry.event}
            for entry in entries
        )
        with opened(path) as file:
            self.attempt.require_newest()
            file.append(b"".join(map(sealed_line, lines)))
