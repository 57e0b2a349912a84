"""Run directories of this format, made once and kept: every later version must be able to resume them.

`python tests/store/fixture_runs.py` makes those of the present format that do not exist yet. They are never made
again, because they test that new code still reads what older code wrote. When `FORMAT` is raised, the runs of the old
number are deleted: such runs are refused with an error that names the format.
"""

import io
import sys
import tarfile
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.components import fake_recipe
from fakes.job import StopError, play, stopping_at
from ppoctl.recipe.schema import Recipe
from ppoctl.store.run_paths import FORMAT

FOLDER = Path(__file__).parent / f"format-{FORMAT}"
STOPS = {"finished": "", "stopped in mid-step": "3 actor_update starts"}
"""Name -> the moment at which the run was stopped; "": not stopped."""


def recipe(*, steps: int = 3) -> Recipe:
    """Return a recipe with few, short responses; no relevant setting has its default."""
    return fake_recipe(
        steps=steps,
        checkpoint={"every_steps": 2},
        generator={"compile": False},  # the default when these runs were made
        ppo={"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}, "critic_only_steps": 1},
        rollout={
            "prompts_per_step": 2, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 5,
            "special_tokens": "drop",  # what versions without this key did
        },
    )  # fmt: skip


def kept(name: str) -> Path:
    """Return the archive of a fixture run."""
    return FOLDER / f"{name.replace(' ', '-')}.tar.gz"


def bring(name: str, folder: Path) -> Path:
    """Unpack a fixture run; return its directory."""
    with tarfile.open(kept(name)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


def _make(name: str, folder: Path) -> None:
    try:
        play(folder / "run", recipe(), stopping_at(STOPS[name]))
    except StopError:
        assert STOPS[name]
    FOLDER.mkdir(exist_ok=True)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=9) as archive:
        archive.add(folder / "run", "run", filter=_without_owner)
    kept(name).write_bytes(packed.getvalue())


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    for name in STOPS:
        if not kept(name).exists():
            with tempfile.TemporaryDirectory() as made:
                _make(name, Path(made))
