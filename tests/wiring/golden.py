"""The golden run: three steps on fakes, whose settings are all different, recorded in `golden_run.json`.

The file has each committed record by field, each metric by name, the ledger, and the final tables of the roles: what
the run computed, not the bytes of its files. Digests are omitted, because they depend on the last bit.

    python tests/wiring/golden.py        rewrites the file; then look at `git diff`

How to judge a difference: everything after a changed number may follow from it, so read from the top and judge the
first one. The difference is right if your change was meant to change that number (a new metric, another name, a
corrected formula) and you can derive the new number by hand. It is wrong if you did not mean to change any result:
then do not rewrite the file, but find the cause. A number that differs between machines by more than the tolerance is
also a bug.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.job import MEMORY, Witness
from ppoctl.core.batch.records import Record
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import JournalLine
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import load_record
from wiring.harness import BASE, open_harness

FILE = Path(__file__).parent / "golden_run.json"
DIGESTS = ("used_by", "tokens", "seal")
"""Digest fields of a ledger line."""
DIGITS = 7


def tables() -> dict[str, Any]:
    """Return the recipe of the harness with fewer and shorter responses."""
    changed = deepcopy(BASE)
    changed["steps"] = 3
    changed["rollout"] |= {"prompts_per_step": 3, "max_new_tokens": 5}
    changed["ppo"] |= {"minibatch_seqs": 3}
    changed["eval"] |= {"every_steps": 2, "samples_per_prompt": 2, "at_start": False}
    return changed


@dataclass
class Reader(Witness):
    """Reads every record back as soon as it is committed."""

    root: Path = Path()
    read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def on_committed(self, line: JournalLine) -> None:
        step, stage, paths = line["step"], line["stage"], RunPaths(self.root)
        manifest = manifests.read(paths.stage(step, stage))
        assert manifest is not None
        record = load_record(paths, step, stage, manifest)
        assert line["figures"] == manifest.figures == record.metrics()
        stages = self.read.setdefault(f"step {step}", {})
        stages[stage] = {**_fields(record), "figures": _plain(line["figures"])}


def golden_run() -> dict[str, Any]:
    """Play the golden run; return everything that it committed, in the order of the steps."""
    with TemporaryDirectory(dir=MEMORY) as folder:
        reader = Reader(root=Path(folder) / "run")
        harness = open_harness(Path(folder), tables(), witness=reader)
        run(harness.job)
        samples = harness.job.paths.ledger.read_text().splitlines()
    ledger = [{name: value for name, value in json.loads(line).items() if name not in DIGESTS} for line in samples]
    tables_at_the_end = {"actor": _plain(harness.actor.table), "critic": _plain(harness.critic.table)}
    return {**reader.read, "ledger": _plain(ledger), "tables at the end": tables_at_the_end}


def _fields(record: Record) -> dict[str, Any]:
    # The summary is among the metrics; a field that is None is not in the record.
    names = [item.name for item in fields(record) if item.name not in ("parent", "lineage", "summary")]
    return {name: _plain(getattr(record, name)) for name in names if getattr(record, name) is not None}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it, with DIGITS digits of each number, and a stamp without its digest."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value.partition(":")[0] if isinstance(value, str) and "@" in value else value


def written(value: Any, indent: str = "") -> str:
    """Return JSON with a line for each name and for each row of a grid."""
    if isinstance(value, Mapping):
        lines = [f'{indent} "{name}": {written(item, indent + " ")}' for name, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"
    if isinstance(value, list) and any(isinstance(item, list | Mapping) for item in value):
        lines = [f"{indent} {json.dumps(item)}" for item in value]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value)


def entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path; a list of numbers is one leaf."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from entries(item, f"{name} / {key}" if name else key)
    elif isinstance(value, list) and not all(isinstance(item, int | float | bool) for item in value):
        for place, item in enumerate(value):
            yield from entries(item, f"{name} [{place}]")
        yield f"{name} (how many)", len(value)
    else:
        yield name, value


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(written(golden_run()) + "\n", encoding="ascii")
