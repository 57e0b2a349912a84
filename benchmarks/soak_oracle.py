"""The comparison of two runs for `soak.py`: read from the run directory alone, by documented formats."""

import hashlib
import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

LEFT_OVER = re.compile(r"\.creating-|\.attempt-|\.tmp$|\.parts$|\.made$|^\.mlflow")
BY_A_CLOCK = ("time/", "throughput/", "memory/", "progress/", "system/")
MEASURED_AGAIN = "sampler"
"""Tensors of a record that are equal only up to rounding if a rollout was finished after a kill."""


def tensors(path: Path) -> dict[str, str]:
    """Return the digest of each tensor of a safetensors file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        what = "shape only" if MEASURED_AGAIN in name else hashlib.sha256(data[begin:end]).hexdigest()
        found[name] = f"{entry['dtype']} {entry['shape']} {what}"
    return found


def states(root: Path) -> dict[str, Any]:
    """Return every file of every saved state, and what its manifest carries over. `.metadata` contains an id and an
    absolute path, and differs between any two runs."""
    found: dict[str, Any] = {}
    for manifest in sorted(root.glob("states/*/*/manifest.json")):
        folder = manifest.parent
        extra = json.loads(manifest.read_text())["extra"]
        names = sorted(path.name for path in folder.iterdir() if path.name not in (".metadata", "manifest.json"))
        found[str(folder.relative_to(root))] = {
            "files": {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names},
            "extra": {key: value for key, value in extra.items() if key not in ("journal_seq", "replay")},
        }
    return found


def journal(root: Path) -> dict[str, Any]:
    """Return metrics and identity by step and stage; the later line of a stage counts."""
    lines = [json.loads(line) for line in (root / "journal.jsonl").read_text().splitlines()]
    stages = [line for line in lines if "stage" in line]
    return {f"{line['step']} {line['stage']}": [line["identity"], line["figures"]] for line in stages}


def outcome(root: Path) -> dict[str, Any]:
    """Return everything of a finished run that clocks and kills may not change."""
    records = {str(path.relative_to(root)): tensors(path) for path in sorted(root.glob("steps/**/*.safetensors"))}
    return {
        "states": states(root),
        "ledger": (root / "ledger.jsonl").read_text().splitlines(),
        "journal": journal(root),
        "records": records,
        "steps": sorted(str(path.relative_to(root)) for path in root.glob("steps/*/*")),
    }


def differences(found: dict[str, Any], expected: dict[str, Any], lost: dict[str, set[int]]) -> list[str]:
    """Yield one line per difference. `lost`: numbers of the lines of ledger and journal that the damage removed.
    Complete steps of the ledger may be lost with them (docs/run-directory.md); later states then record a shorter
    ledger."""
    problems = []
    if "ledger.jsonl" in lost:
        found, expected = _without_length(found), _without_length(expected)
    for part in ("states", "journal", "records"):
        for name in sorted(found[part].keys() | expected[part].keys()):
            if found[part].get(name) == expected[part].get(name):
                continue
            if part == "journal" and name not in expected[part] and lost.get("journal.jsonl"):
                continue  # a lost line that was made again
            problems.append(f"{part}: {name} differs{_inside(found[part].get(name), expected[part].get(name))}")
    if found["steps"] != expected["steps"]:
        problems.append(f"steps: {sorted(set(found['steps']) ^ set(expected['steps']))} on one side only")
    steps = {_step(expected, number) for number in lost.get("ledger.jsonl", ())}
    gone = {number for number in range(len(expected["ledger"])) if _step(expected, number) in steps}
    for number, line in enumerate(expected["ledger"]):
        if number not in gone and line not in found["ledger"]:
            problems.append(f"ledger: line {number + 1} is missing or another")
    if more := [line for line in found["ledger"] if line not in expected["ledger"]]:
        problems.append(f"ledger: {len(more)} lines that are not the reference's")
    if not gone and not problems and found["ledger"] != expected["ledger"]:
        problems.append("ledger: lines in another order, or twice")
    return problems


def _step(expected: dict[str, Any], number: int) -> int:
    return int(json.loads(expected["ledger"][number])["step"])


def _without_length(of_a_run: dict[str, Any]) -> dict[str, Any]:
    states = {
        name: {**state, "extra": {key: value for key, value in state["extra"].items() if key != "ledger_bytes"}}
        for name, state in of_a_run["states"].items()
    }
    return {**of_a_run, "states": states}


def without(expected: dict[str, Any], journal_of_the_run: Path, lost: set[int]) -> dict[str, Any]:
    """Return the expected outcome if these lines of the journal, from 0, are missing: their stages may have none."""
    lines = [json.loads(line) for line in journal_of_the_run.read_text().splitlines()]
    names = {
        f"{line['step']} {line['stage']}" for number, line in enumerate(lines) if number in lost and "stage" in line
    }
    return {**expected, "journal": {name: each for name, each in expected["journal"].items() if name not in names}}


def _inside(found: Any, expected: Any) -> str:
    """Return where two values differ, in readable form."""
    if found is None or expected is None:
        return ": missing" if found is None else ": not in the reference"
    text = [f"{found} against {expected}"]
    if isinstance(found, dict):
        text = [f"{key} {found.get(key)}/{expected[key]}" for key in expected if found.get(key) != expected[key]]
    return ": " + "; ".join(text)[:300]


def left_over(runs: Path, tmp: Path) -> list[str]:
    """Yield the names of leftovers of an ended run: in the runs folder, and in the folder for temporary files."""
    inside = [path for path in runs.rglob("*") if LEFT_OVER.search(path.name)]
    kept = [path for path in inside if not {"discarded", "logs"} & set(path.relative_to(runs).parts[:-1])]
    return [str(path) for path in kept] + [str(path) for path in tmp.glob("ppoctl-*")]


def paths(root: Path) -> set[str]:
    """Return all path names below, while other processes create and remove some."""
    return {
        os.path.relpath(Path(top, name), root) for top, *names in os.walk(root) for name in [*names[0], *names[1]]
    }


def mlflow(runs: Path) -> dict[str, Any]:
    """Return the status of the only run and its points, except those that contain times."""
    with sqlite3.connect(f"file:{runs / 'mlflow.db'}?mode=ro", uri=True) as base:
        status = [row[0] for row in base.execute("select status from runs")]
        points = base.execute("select key, step, value from metrics order by key, step").fetchall()
    doubled = {(key, step) for key, step, _ in points if sum(p[:2] == (key, step) for p in points) > 1}
    values = {f"{key} {step}": value for key, step, value in points if not key.startswith(BY_A_CLOCK)}
    return {"status": status, "doubled": sorted(doubled), "values": values}
