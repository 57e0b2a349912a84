"""Stand-ins for Slurm's programs on a login node: they answer from a folder and log their calls."""

import os
from pathlib import Path

import pytest

# Without child processes where that is possible: a fork may take a second on a busy machine.
PROGRAM = """#!/bin/bash
cd -- "${0%/*}" || exit 1
echo "${0##*/} $*" >>asked
[ ! -e away ] || exec sleep 20
[ ! -e refuses-"${0##*/}" ] || { cat refuses-"${0##*/}" >&2; exit 1; }
"""
SQUEUE = r"""
for word; do case $word in --jobs=*) ids=${word#--jobs=} ;; esac; done
for id in ${ids//,/ }; do
    if [ -e "job-$id" ]; then read -r line <"job-$id"; found+="$line"$'\n'; fi
done
printf %s "$found"
case "$ids|$found" in *,*|*\|*\|*) exit 0 ;; esac
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""
SACCT = """
[ -e accounting ] || { echo "Slurm accounting storage is disabled" >&2; exit 1; }
cat accounting
"""
SCANCEL = """
id=${!#}
case "$*" in
    *--signal=*) ;;
    *--state=PENDING*) if grep -q "|PENDING|" "job-$id"; then sed -i "s/|PENDING|/|CANCELLED|/" "job-$id"; fi ;;
    *) sed -i "s/^$id|[A-Z]*|/$id|CANCELLED|/" "job-$id" ;;
esac
[ ! -e begins-after-"$id" ] || sed -i "s/|PENDING|/|RUNNING|/" job-"$(cat begins-after-"$id")"
"""


class FakeSlurm:
    """The cluster that the programs report on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, text in (("squeue", SQUEUE), ("sacct", SACCT), ("scancel", SCANCEL)):
            (folder / name).write_text(PROGRAM + text)
            (folder / name).chmod(0o755)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the programs first in PATH; this process is not in a job."""
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        monkeypatch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")

    def has(
        self, id: str, state: str, *, reason: str = "None", nodes: str = "", restarts: int = 0, **times: str
    ) -> None:
        """Set the state of a job; `start`, `end`: unix seconds, `status`: exit status of its process."""
        values = [id, state, reason, nodes, str(restarts), times.get("status", "0")]
        values += [times.get("start", "N/A"), times.get("end", "N/A")]
        (self.folder / f"job-{id}").write_text("|".join(values) + "|\n")

    def state(self, id: str) -> str:
        return (self.folder / f"job-{id}").read_text().split("|")[1]

    def forgets(self, id: str) -> None:
        (self.folder / f"job-{id}").unlink()

    def goes_away(self) -> None:
        """Make every program hang."""
        (self.folder / "away").touch()

    def refuses(self, program: str, message: str) -> None:
        (self.folder / f"refuses-{program}").write_text(message + "\n")

    def accounts(self, *lines: str) -> None:
        """Turn accounting on; `sacct` then prints these lines for every call."""
        (self.folder / "accounting").write_text("".join(line + "\n" for line in lines))

    def begins_when_cancelled(self, id: str, *, cancelled: str) -> None:
        """Start the job as soon as the other one is cancelled."""
        (self.folder / f"begins-after-{cancelled}").write_text(id)

    @property
    def calls(self) -> list[str]:
        """Every call so far, oldest first."""
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []
