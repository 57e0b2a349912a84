"""A soak test of `ppoctl` on its real engines, from outside: `python benchmarks/soak.py --folder FOLDER`.

Runs of the quickstart, shortened to four small steps, receive signals at random moments of their whole life and are
slowed at random; run directories are damaged at random. Then the printed hint is executed literally until the run has
ended, and the result is compared with that of an undisturbed run. Only the command line and the run directory are
used. One integer seeds everything: case 17 of `--seed 3` is always the same, except for clocks.

    python benchmarks/soak.py --folder FOLDER                         # 200 kills, 200 damages; continues after a stop
    python benchmarks/soak.py --folder FOLDER --minutes 30            # as many as fit
    python benchmarks/soak.py --folder FOLDER --only kill-17 damage-4 # these cases (again)

A line per case is printed, `results.jsonl` keeps them, `table.md` summarizes them. Exit 1 if there was a mismatch. If
a mode was removed, the commands also lose root's right to read everything.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import soak_damage
import soak_oracle
from soak_process import HANG_S, Blow, Ended, Slow, Starter, slowness

from leftover import shared_memory

ROOT = Path(__file__).parents[1]
SIGNALS = ("KILL", "KILL group", "STOP KILL group", "TERM", "TERM TERM", "INT", "INT INT", "HUP", "reward child")
"""Two words: the second follows the first. `group`: to the process group, as a terminal or a scheduler does."""
ENDS = {
    "KILL": {-9},
    "STOP": {-9},
    "TERM": {75, -15},
    "INT": {130, -2},
    "HUP": {75, -1},
    "reward": {0},
}
"""Exit codes by first word (docs/errors.md). Before and after ppoctl handles signals, a signal ends it like any
program."""
REFUSED = {2, 8}
"""Exit codes for a damaged run directory: usage or recipe, storage."""
SETTINGS = {
    "name": "soak",
    "steps": "4",
    "rollout.prompts_per_step": "8",
    "rollout.max_prompt_tokens": "96",
    "rollout.max_new_tokens": "24",
    "rollout.keep_finished_every_s": "1e-9",
    "ppo.minibatch_seqs": "4",
    "eval.every_steps": "2",
    "eval.at_start": "false",
    "data.eval.heldout.max_rows": "4",
    "expect": "{}",
    "cluster.threads": "1",
}
VARIANTS = {
    "every 3": {"checkpoint.every_steps": "3", "tracking.kind": "none"},
    "every 2": {"checkpoint.every_steps": "2", "tracking.kind": "none"},
    "every 2, waits": {"checkpoint.every_steps": "2", "checkpoint.asynchronous": "false", "tracking.kind": "none"},
    "every 3, mlflow": {"checkpoint.every_steps": "3"},
    "every 2, overlap": {
        "checkpoint.every_steps": "2",
        "tracking.kind": "none",
        "rollout.ahead": "1",
        "rollout.tokens_per_step": "10",
        "ppo.rollout_correction.kind": "tis",
    },
    "every 4, two ahead": {
        "checkpoint.every_steps": "4",
        "tracking.kind": "none",
        "eval.every_steps": "4",
        "rollout.ahead": "2",
        "ppo.rollout_correction.kind": "tis",
    },
}
LAST = "states/actor/000004/manifest.json"
MAX_COMMANDS = 10
DONE = ("--set", "steps=5")
"""The options that continue a finished run."""


class Mismatch(Exception):  # noqa: N818 - not an error of this program
    """A result that should not occur."""


class Soak:
    """All cases of one seed, in one folder, which is reused."""

    def __init__(self, folder: Path, seed: int, variant: str | None = None) -> None:
        self.folder, self.seed, self.variant = folder, seed, variant
        self.results = folder / "results.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.tmp = folder / "tmp"
        self.tmp.mkdir(exist_ok=True)
        self.start = Starter({"TMPDIR": str(self.tmp), "HOME": str(self.tmp), "PYTHONHASHSEED": "0"})
        self.screens: list[Ended] = []
        self.shared: set[str] = set()

    # -- commands

    def run(self, case: Path, words: list[str], **how: Any) -> Ended:
        """Run one command of ppoctl; check everything that it prints."""
        ended = self.start(case, words, **how)
        with (case / "all-screens").open("a") as every:
            every.write(f"$ ppoctl {shlex.join(words)}  # {ended.struck}\n{ended.screen}exit {ended.code}\n\n")
        self.screens.append(ended)
        for bad in ("Traceback (most recent call last)", "internal:"):
            if bad in ended.screen:
                raise Mismatch(f"`{bad}` on the screen of `ppoctl {shlex.join(words)}` (exit {ended.code})")
        if ended.orphans:
            raise Mismatch(f"orphans of `ppoctl {shlex.join(words)}`: {ended.orphans}")
        if "hung" in ended.struck:
            raise Mismatch(f"`ppoctl {shlex.join(words)}` {ended.struck}")
        return ended

    def train(self, variant: str) -> list[str]:
        sets = [f"--set={key}={value}" for key, value in {**SETTINGS, **VARIANTS[variant]}.items()]
        return ["train", str(ROOT / "recipes/quickstart.toml"), *sets]

    def follow(self, case: Path, ended: Ended, **how: Any) -> Ended | None:
        """Execute the hint of a failed command literally; return None if it only inspects something."""
        hint = hinted(ended.screen)
        if hint is None:
            raise Mismatch(
                f"no hint after exit {ended.code} of `ppoctl {shlex.join(ended.words)}`: {ended.screen[-300:]}"
            )
        words = shlex.split(hint, comments=True)
        if words[0] == "ppoctl":
            done = self.run(case, words[1:], **how)
            looks = words[1] in ("status", "show", "plan", "validate") or "--plan" in words
            return None if looks else done
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        finished = subprocess.run(
            ["sh", "-c", hint],
            cwd=case,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        with (case / "all-screens").open("a") as every:
            every.write(f"$ {hint}\n{finished.stdout}{finished.stderr}exit {finished.returncode}\n\n")
        return Ended(words, 0, "", 0.0) if words[0] in ("rm", "mv", "cp", "chmod", "mkdir") else None

    # -- undisturbed runs

    def reference(self, variant: str) -> dict[str, Any]:
        """Return the outcome of the undisturbed run, and the order in which its paths were created; made once."""
        case = self.folder / "reference" / variant.replace(", ", "-").replace(" ", "-")
        reference_file = case / "reference.json"
        if not reference_file.exists():
            shutil.rmtree(case, ignore_errors=True)
            case.mkdir(parents=True)
            root, seen = case / "runs/soak", list[str]()

            def watch(_: float) -> bool:
                seen.extend(sorted(soak_oracle.paths(root) - set(seen)))
                return False

            ended = self.run(case, self.train(variant), blow=Blow("KILL", watch, 0.0))
            assert ended.code == 0, ended.screen
            found = {"outcome": soak_oracle.outcome(root), "seconds": ended.seconds}
            if "mlflow" in variant:
                found["mlflow"] = soak_oracle.mlflow(case / "runs")
            # Finished samples are many files, which are all alike.
            found["order"] = [name for number, name in enumerate(seen) if ".parts/" not in name or number % 8 == 0]
            reference_file.write_text(json.dumps(found))
        found = json.loads(reference_file.read_text())
        return {**found, "root": case / "runs/soak"}

    def half(self) -> Path:
        """Return a run that was killed in step 4, with its states of step 3 saved."""
        case = self.folder / "reference" / "half"
        root = case / "runs/soak"
        if not (case / "made").exists():
            shutil.rmtree(case, ignore_errors=True)
            case.mkdir(parents=True)
            needed = [root / f"states/{role}/000003/manifest.json" for role in ("actor", "critic")]
            needed.append(root / "steps/000004/50-advantages/manifest.json")
            blow = Blow("KILL", lambda _: all(path.exists() for path in needed), 0.0)
            slow = Slow(files="60-critic_update", fsync_s=20.0)
            ended = self.run(case, self.train("every 3"), blow=blow, slow=slow)
            assert ended.code == -9, ended.screen
            (case / "made").touch()
        return root

    def longer(self) -> dict[str, Any]:
        """Return the outcome of the finished run, continued to five steps."""
        whole = self.reference("every 3")["root"]
        case = self.folder / "reference" / "longer"
        reference_file = case / "reference.json"
        if not reference_file.exists():
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(whole, case / "runs/soak")
            ended = self.run(case, ["resume", "runs/soak", *DONE])
            assert ended.code == 0, ended.screen
            reference_file.write_text(json.dumps(soak_oracle.outcome(case / "runs/soak")))
        return dict(json.loads(reference_file.read_text()))

    # -- kills

    def kill(self, case: Path, rng: random.Random) -> tuple[str, dict[str, int]]:
        """Disturb one run one to three times, then continue it to its end."""
        variant = self.variant or rng.choices(list(VARIANTS), weights=(3, 2, 2, 2, 2, 2))[0]
        reference = self.reference(variant)
        root, events, counts = case / "runs/soak", [variant], Counter[str]()
        command, expected = self.train(variant), {0}
        blows = rng.choices((1, 2, 3), weights=(2, 2, 1))[0]
        for number in range(MAX_COMMANDS):
            kind = rng.choice(SIGNALS)
            strikes = number < blows
            blow = Blow(kind, self.moment(root, reference, rng), rng.uniform(0.01, 1.5)) if strikes else None
            ended = self.run(case, command, blow=blow, slow=slowness(rng) if strikes else None)
            if ended.struck:
                # A signal that met only the end of the process does not count.
                counts[kind] += ended.code != 0 or kind == "reward child"
                events.append(f"{ended.struck}: {ended.code}")
            expected = {0} | (ENDS[kind.split()[0]] if ended.struck else set())
            if ended.code not in expected:
                raise Mismatch(f"exit {ended.code} of `ppoctl {command[0]}` after {events}: {ended.screen[-400:]}")
            if ended.code == 0:
                break
            hint = hinted(ended.screen)
            command = ["resume", "runs/soak"] if root.exists() else self.train(variant)
            if hint is not None and hint.startswith("ppoctl "):
                command = shlex.split(hint)[1:]
        else:
            raise Mismatch(f"not ended after {MAX_COMMANDS} commands: {events}")
        self.hold(case, reference["outcome"], steps=4)
        if "mlflow" in reference:
            found = soak_oracle.mlflow(case / "runs")
            for part, expect in reference["mlflow"].items():
                if json.loads(json.dumps(found[part])) != expect:
                    raise Mismatch(f"MLflow: {part} is {str(found[part])[:300]}")
        return "; ".join(events), dict(counts)

    def moment(self, root: Path, reference: dict[str, Any], rng: random.Random) -> Any:
        """Return when to strike: at a time, or when a path appears that the reference has, too; at the latest when
        the last file of the run appears, so that hardly any signal misses."""
        at_s = rng.uniform(0.0, float(reference["seconds"])) if rng.random() < 0.4 else HANG_S
        there = soak_oracle.paths(root)
        if LAST in there:
            at_s = rng.uniform(0.0, float(reference["seconds"]) / 2)
        order = [name for name in reference["order"] if name not in there]
        name = order[int(rng.random() * len(order))] if order else LAST
        delay_s, since = rng.uniform(0.0, 0.05), list[float]()
        # The numbers of the writing attempt and process differ.
        pattern = re.sub(
            r"attempt\\-\d+|\d+\\\.tmp", lambda found: re.sub(r"\d+", r"\\d+", found[0]), re.escape(name)
        )
        comes = re.compile(f"{pattern}|{re.escape(LAST)}")

        def reached(seconds: float) -> bool:
            if not since and any(comes.fullmatch(each) for each in soak_oracle.paths(root) - there):
                since.append(seconds)
            return seconds >= at_s or (bool(since) and seconds >= since[0] + delay_s)

        return reached

    def hold(
        self, case: Path, expected: dict[str, Any], *, steps: int, lost: dict[str, set[int]] | None = None
    ) -> None:
        """Require that the run ended as the reference did, reports so, and leaves nothing."""
        root = case / "runs/soak"
        status = self.run(case, ["status", "runs/soak", "--json"])
        report = json.loads(status.screen)
        if status.code or (report["state"], report["steps_done"]) != ("finished", steps):
            raise Mismatch(f"status: {report.get('state')}, step {report.get('steps_done')}, exit {status.code}")
        if problems := soak_oracle.differences(soak_oracle.outcome(root), expected, lost or {}):
            raise Mismatch("not the reference: " + " | ".join(problems[:6]) + f" ({len(problems)} in all)")
        left = soak_oracle.left_over(case / "runs", self.tmp)
        if left := left + sorted(shared_memory() - self.shared):
            raise Mismatch(f"left over: {left[:5]}")

    # -- damages

    def damage(self, case: Path, rng: random.Random) -> tuple[str, dict[str, int]]:
        """Damage a killed or a finished run once; inspect it, plan it, and resume it to its end by the hints."""
        is_half = rng.random() < 0.6
        original = self.half() if is_half else self.reference("every 3")["root"]
        expected = self.reference("every 3")["outcome"] if is_half else self.longer()
        root, steps = case / "runs/soak", 4 if is_half else 5
        shutil.copytree(original, root)
        damage = soak_damage.hurt(root, original, rng)
        how: dict[str, Any] = {}
        if damage.kind == "mode":
            how["powerless"] = True
        hurt = soak_damage.changed(root, original)
        events = [f"{'half' if is_half else 'finished'}: {damage.what}"]
        resume = ["resume", "runs/soak", *([] if is_half else DONE)]
        for words in (["status", "runs/soak"], [*resume, "--plan"]):
            events.append(f"{words[0]}{' --plan' * ('--plan' in words)} {self.looked(case, words, how).code}")
        outcome = self.resume_to_end(case, resume, damage, how)
        if outcome == "unharmed" and soak_damage.put_back(root, original, hurt):
            outcome = (
                "asleep"  # a resume does not read it; a command that shows it names it (`store/test_stage_runner.py`)
            )
        events.append(outcome)
        lost = damage.lost if outcome == "mended" else {}
        if "journal.jsonl" in lost:
            expected = soak_oracle.without(expected, original / "journal.jsonl", lost["journal.jsonl"])
        self.hold(case, expected, steps=steps, lost=lost)
        for name in lost:
            if not any(name in ended.screen for ended in self.screens):
                raise Mismatch(f"{damage.what}: `{name}` is not named")
        return "; ".join(events), {damage.kind: 1, outcome: 1}

    def looked(self, case: Path, words: list[str], how: dict[str, Any]) -> Ended:
        ended = self.run(case, words, **how)
        if ended.code not in {0} | REFUSED:
            raise Mismatch(f"exit {ended.code} of `ppoctl {shlex.join(words)}`: {ended.screen[-300:]}")
        if ended.code and hinted(ended.screen) is None:
            raise Mismatch(f"no hint of `ppoctl {shlex.join(words)}`: {ended.screen[-300:]}")
        return ended

    def resume_to_end(self, case: Path, resume: list[str], damage: soak_damage.Damage, how: dict[str, Any]) -> str:
        """Resume, and follow hints, to the end; return how. If a hint only inspects something, restore the file from
        a copy, or its permissions, as a user would."""
        outcome, hints_seen = "unharmed", list[str]()
        for _ in range(MAX_COMMANDS):
            ended = self.looked(case, resume, how)
            if ended.code == 0:
                return outcome
            while ended.code != 0:
                hint = str(hinted(ended.screen))
                if hints_seen.count(hint) > 1:
                    raise Mismatch(f"{damage.what}: the hint `{hint}` was executed twice and mends nothing")
                followed = self.follow(case, ended, **how)
                hints_seen.append(hint)
                if followed is None:
                    if outcome == "restored":
                        raise Mismatch(
                            f"{damage.what}: refused after the original was brought: {ended.screen[-300:]}"
                        )
                    damage.undo()
                    outcome = "restored"
                    break
                outcome, ended = "mended", followed
                if ended.code not in {0} | REFUSED:
                    raise Mismatch(f"exit {ended.code} of the hinted `{hint}`: {ended.screen[-300:]}")
        raise Mismatch(f"{damage.what}: not ended after {MAX_COMMANDS} hints: {hints_seen[-3:]}")

    # -- cases

    def case(self, name: str) -> dict[str, Any]:
        """Run one case by its name, such as `kill-17`."""
        kind = name.partition("-")[0]
        folder = self.folder / "cases" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.screens, self.shared, began = [], shared_memory(), time.monotonic()
        rng = random.Random(f"{self.seed} {name}")
        try:
            summary, counts = (self.kill if kind == "kill" else self.damage)(folder, rng)
            mismatch = ""
        except Mismatch as found:
            summary, counts, mismatch = "", {}, str(found)
            for path in self.tmp.glob("ppoctl-*"):
                shutil.move(path, folder)
        struck = [ended.struck for ended in self.screens if ended.struck]
        result = {
            "case": name,
            "seed": self.seed,
            "told": summary or "; ".join(struck),
            "counts": counts,
            "mismatch": mismatch,
            "commands": len(self.screens),
            "seconds": round(time.monotonic() - began, 1),
            "codes": [ended.code for ended in self.screens],
        }
        with self.results.open("a") as results:
            results.write(json.dumps(result) + "\n")
        if not mismatch:
            shutil.rmtree(folder)
        return result


def hinted(screen: str) -> str | None:
    """Return the command in the last `hint:`; if it names several, the command that continues the run."""
    lines = [line for line in screen.splitlines() if line.startswith("hint:")]
    if not lines:
        return None
    parts = [part.rpartition(": ")[2] for part in lines[-1][len("hint:") :].strip().split("; ")]
    names = ("ppoctl", "rm", "mv", "ls", "df", "chmod", "mkdir", "cp", "less")
    commands = [part.strip() for part in parts if part.split() and part.split()[0] in names]
    if not commands:
        return None
    going_on = [
        each for each in commands if each.startswith(("ppoctl resume", "ppoctl train")) and "--plan" not in each
    ]
    return [*commands, *going_on][-1]


def table(results: list[dict[str, Any]]) -> str:
    """Return Markdown of all cases, the newest result of each."""
    newest = {(each["seed"], each["case"]): each for each in results}.values()
    rows = ["| | cases | struck or damaged | mismatches |", "|---|---|---|---|"]
    for kind in ("kill", "damage"):
        of_kind = [each for each in newest if each["case"].startswith(kind)]
        sums = sum((Counter(each["counts"]) for each in of_kind), Counter[str]())
        shown = ", ".join(f"{name} {count}" for name, count in sorted(sums.items()))
        rows.append(f"| {kind} | {len(of_kind)} | {shown} | {sum(bool(each['mismatch']) for each in of_kind)} |")
    rows += [f"\n- seed {each['seed']}, {each['case']}: {each['mismatch']}" for each in newest if each["mismatch"]]
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and damages runs of ppoctl, and holds how they end.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200, help="signals, not cases")
    parser.add_argument("--damages", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after that")
    parser.add_argument("--variant", choices=list(VARIANTS), help="only this one")
    parser.add_argument("--only", nargs="*", help="cases by name, also such as were done")
    args = parser.parse_args()
    soak = Soak(args.folder.resolve(), args.seed, args.variant)
    results = [json.loads(line) for line in soak.results.read_text().splitlines()] if soak.results.exists() else []
    before = len(results)
    until = time.monotonic() + 60 * args.minutes
    mine = [each for each in results if each["seed"] == args.seed]
    done = {each["case"] for each in mine}
    number = 0
    while time.monotonic() < until:
        if args.only:
            names = args.only[number : number + 1]
        else:
            signals = sum(sum(each["counts"].values()) for each in mine if each["case"].startswith("kill"))
            wanted = ["kill"] * (signals < args.kills) + ["damage"] * (number < args.damages)
            names = [f"{kind}-{number + 1}" for kind in wanted]
        number += 1
        if not names:
            break
        for name in [each for each in names if args.only or each not in done]:
            result = soak.case(name)
            mine.append(result)
            results.append(result)
            verdict = result["mismatch"] and f"MISMATCH {result['mismatch']}"
            print(f"{name:<11} {result['seconds']:>6} s  {result['told']}  {verdict or 'equal'}", flush=True)
            (soak.folder / "table.md").write_text(table(results))
    soak.start.close()
    print("\n" + table(results))
    judged = results[before:] if args.only else mine
    return int(any(each["mismatch"] for each in judged))


if __name__ == "__main__":
    sys.exit(main())
