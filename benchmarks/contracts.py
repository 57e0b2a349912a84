"""Runs the recipes with a published result on their GPUs, and writes one table of the reached values.

    python benchmarks/contracts.py [RECIPE ...] [--runs FOLDER] [--out FILE] [--gpus N] [--set KEY=VALUE ...]

Without recipes: every shipped recipe whose header has `Published`. A stopped run is resumed (`train --or-resume`), so
the same command may be typed again. Exit 0: all runs meet their expectations; 5: an expectation is not met; 1: a run
ended otherwise.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.cli.manual.header import header_of
from ppoctl.core.errors import ExitCode
from ppoctl.core.machine import nvml
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import devices

RECIPES = Path(__file__).parents[1] / "recipes"
HEADERS = ("recipe", "published", "figure", "bound", "reached", "step", "verdict")
Row = tuple[str, ...]


@dataclass(frozen=True)
class Contract:
    """A recipe with its expectations."""

    file: Path
    name: str
    published: str
    gpus: int
    """GPUs that it takes; 0: it is sized for a CPU."""

    @staticmethod
    def of(file: Path, sets: Sequence[str]) -> "Contract":
        """Return the contract of a recipe, whose data may be missing on this machine."""
        recipe, head = load([file], sets, {"PPOCTL_DATA": "/data"}).recipe, header_of(file.read_text("utf-8"))
        inside = file.relative_to(RECIPES) if file.is_relative_to(RECIPES) else Path(file.name)
        gpus = 0 if recipe.model.dtype == "float32" else devices(recipe)
        return Contract(file, inside.with_suffix("").as_posix(), head.parts.get("Published", ""), gpus)


def published() -> list[Path]:
    """Return the files of shipped recipes with a published result."""
    return [
        file for file in sorted(RECIPES.rglob("*.toml")) if "Published" in header_of(file.read_text("utf-8")).parts
    ]


def rows(contract: Contract, outcome: dict[str, Any], code: int) -> Iterator[Row]:
    """Yield a row of the table for each expected metric, or one row for a run that ended otherwise."""
    first = (contract.name, contract.published)
    if code not in (ExitCode.DONE, ExitCode.HEALTH) or not outcome.get("expect"):
        says = outcome.get("error", {}).get("message", "no expectation").splitlines()[0]
        yield (*first, "", "", "", "", f"FAILED ({code}): {says}")
        return
    for verdict in outcome["expect"]:
        value = "-" if verdict["value"] is None else f"{verdict['value']:.4g}"
        result = "met" if verdict["met"] else "UNMET"
        yield (*first, verdict["metric"], verdict["bound"], value, str(verdict["step"]), result)


def keep(contracts: Sequence[Contract], gpus: int, command: Sequence[str], options: Sequence[str]) -> Iterator[Row]:
    """Run one contract after the other; contracts that need more GPUs than this machine has are listed but not
    run."""
    for contract in contracts:
        if contract.gpus > gpus:
            yield (contract.name, contract.published, "", "", "", "", f"not run: {contract.gpus} GPUs, {gpus} here")
            continue
        words = [*command, "train", str(contract.file), "--or-resume", "--json", *options]
        print(f"$ {shlex.join(words)}", file=sys.stderr, flush=True)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        try:
            outcome = json.loads(done.stdout)
        except json.JSONDecodeError:
            outcome = {}
        yield from rows(contract, outcome, done.returncode)


def as_table(found: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [HEADERS, ("---",) * len(HEADERS), *found]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def exit_code(found: Sequence[Row]) -> int:
    """Return the exit code for all of them."""
    verdicts = [row[-1] for row in found]
    if any(verdict.startswith("FAILED") for verdict in verdicts):
        return int(ExitCode.INTERNAL)
    return int(ExitCode.HEALTH if "UNMET" in verdicts else ExitCode.DONE)


def gpus_here() -> int:
    """Return the number of GPUs of this machine."""
    driver = nvml.look()
    return len(driver.gpus) if isinstance(driver, nvml.Driver) else 0


def main(words: Sequence[str], command: Sequence[str] = (sys.executable, "-m", "ppoctl")) -> int:
    """Run the command line; print the table and write it. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/contracts"))
    parser.add_argument("--out", type=Path, default=Path("contracts.md"))
    parser.add_argument("--gpus", type=int, default=None)
    parser.add_argument("--set", action="append", default=[], dest="sets")
    args = parser.parse_args(words)
    contracts = [Contract.of(file.resolve(), args.sets) for file in args.recipes or published()]
    options = ["--runs", str(args.runs), *(word for item in args.sets for word in ("--set", item))]
    found: list[Row] = []
    for row in keep(contracts, gpus_here() if args.gpus is None else args.gpus, command, options):
        found.append(row)
        args.out.write_text(as_table(found), "utf-8")  # written after each row: the next run may take a day
    print(as_table(found), end="")
    return exit_code(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
