"""A run on a file system that is too small and is then enlarged; executed as a process in its own user and mount
namespaces.

python small_disk.py FOLDER KIB...

Exits 0 if on each disk the run ended with the error for a full disk, lost nothing that was committed, and was
completed afterwards.
"""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.components import fake_recipe
from fakes.job import play, result
from ppoctl.errors import StorageError
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths


def main(folder: Path, *sizes_kib: int) -> None:
    recipe = fake_recipe(rollout={**ROLLOUT})
    play(folder / "whole", recipe)
    for kib in sizes_kib:
        disk = folder / f"disk-{kib}"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(disk)], check=True)
        with pytest.raises(StorageError, match="No space left on device"):
            play(disk / "run", recipe)
        assert not plan_resume(RunPaths(disk / "run")).broken
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        play(disk / "run", recipe)
        assert result(disk / "run") == result(folder / "whole"), f"{kib} KiB"


ROLLOUT = {
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "max_prompt_tokens": 4,
    "max_new_tokens": 6,
    "keep_finished_every_s": 1e-9,
}

if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
