"""The shipped site files: each loads under the shipped recipes, and gives a script that bash can parse."""

import subprocess
from pathlib import Path

import pytest

from ppoctl.recipe.loading.load import Loaded, load
from ppoctl.recipe.parallel import nodes_of
from ppoctl.start.slurm.script import Work, batch_script

ROOT = Path(__file__).resolve().parents[2]
SITES = sorted((ROOT / "slurm").glob("*.toml"))
NAMES = ("modules", "pyxis", "apptainer", "offline")
ENVIRON = {"PPOCTL_DATA": "/data", "MLFLOW_AT": "http://host"}
LARGE = "dsr1-7b"
NODES = {("modules", LARGE): 8, ("pyxis", LARGE): 8, ("apptainer", LARGE): 16, ("offline", LARGE): 16}


def with_site(site: Path, recipe: str) -> Loaded:
    return load([ROOT / "recipes" / f"{recipe}.toml"], (), ENVIRON | {"PPOCTL_SITE": str(site)})


@pytest.mark.parametrize("recipe", ["quickstart", LARGE])
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.stem)
def test_site_file_loads_with_a_recipe_and_gives_a_valid_script(site: Path, recipe: str, tmp_path: Path) -> None:
    loaded = with_site(site, recipe)
    assert nodes_of(loaded.recipe) == NODES.get((site.stem, recipe), 1)
    text = batch_script(loaded.recipe, Work(("resume", "run"), tmp_path, "%j.log", is_run=True), ["ppoctl"])
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (read.returncode, read.stderr) == (0, "")
    for key, origin in loaded.origins.items():
        assert not origin.startswith(str(site)) or key.startswith(("slurm.", "tracking.")), key


def test_common_site_files_are_documented() -> None:
    assert {site.stem for site in SITES} == {*NAMES}
    kinds = [with_site(ROOT / f"slurm/{name}.toml", "quickstart").recipe.slurm.container.kind for name in NAMES]
    assert kinds == ["none", "pyxis", "apptainer", "none"]
    readme = (ROOT / "slurm" / "README.md").read_text("utf-8")
    for site in SITES:
        assert site.read_text("utf-8").startswith("# A site ")
        assert f"]({site.name})" in readme
