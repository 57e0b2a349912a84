"""The site file: the weakest layer, found by a variable or in the user's settings, and without effect on results."""

from pathlib import Path

import pytest

from ppoctl.core.errors import PpoctlError
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.loading.write import recipe_as_toml
from recipe.conftest import SMALLEST, Write

SITE = """\
[slurm]
partition = "gpu"
time = "12:00:00"
[slurm.options]
exclude = "node7"
[tracking]
kind = "mlflow"
uri = "$MLFLOW"
"""


def problems(files: list[Path], environ: dict[str, str]) -> tuple[list[str], str | None]:
    with pytest.raises(PpoctlError) as caught:
        load(files, (), environ)
    return caught.value.message.splitlines(), caught.value.hint


def test_site_file_is_weakest_layer_and_has_origins(write: Write) -> None:
    files = [write(SMALLEST + '[slurm]\ntime = "01:00:00"\n')]
    site = write(SITE, "site.toml")
    loaded = load(files, ["slurm.options.comment=x"], {"PPOCTL_SITE": str(site), "PPOCTL_SLURM__QOS": "high"})
    table = loaded.recipe.slurm
    assert (table.partition, table.time, table.qos) == ("gpu", "01:00:00", "high")
    assert table.options == {"exclude": "node7", "comment": "x"}
    assert loaded.origins["slurm.partition"] == "site.toml:2"
    assert loaded.origins["slurm.options.exclude"] == "site.toml:5"
    assert loaded.origins["slurm.time"] == "r.toml:21"
    assert loaded.origins["tracking.uri"] == "site.toml:8"
    assert loaded.files == tuple(files)


def test_site_file_is_in_user_settings_unless_variable_is_set(write: Write, smallest: Path, tmp_path: Path) -> None:
    write(SITE, "home/.config/ppoctl/slurm.toml")
    write(SITE.replace("gpu", "other"), "settings/ppoctl/slurm.toml")
    home, settings = {"HOME": str(tmp_path / "home")}, {"XDG_CONFIG_HOME": str(tmp_path / "settings")}
    for environ, partition in (
        (home, "gpu"),
        (home | settings, "other"),
        (home | {"PPOCTL_SITE": str(tmp_path / "settings/ppoctl/slurm.toml")}, "other"),
        (home | {"PPOCTL_SITE": "~/none/such"}, "missing"),
        (home | {"PPOCTL_SITE": ""}, None),
        ({"HOME": str(tmp_path)}, None),
        ({}, None),
    ):
        if partition == "missing":
            assert "no such file" in problems([smallest], environ)[0][0]
        else:
            assert load([smallest], (), environ).recipe.slurm.partition == partition


def test_missing_site_file_error_names_its_variable(smallest: Path) -> None:
    lines, hint = problems([smallest], {"PPOCTL_SITE": "/no/site.toml"})
    assert lines == ["environment PPOCTL_SITE: `/no/site.toml`: no such file"]
    assert hint == "export PPOCTL_SITE=  # no site file"


def test_site_file_rejects_keys_that_change_results(write: Write, smallest: Path) -> None:
    text = "seed = 1\n[slurm]\nnodes = 2\n[rollout]\nmax_new_tokens = 13\n[data.eval.more]\nformat = 'gsm8k'\n"
    site = write(text, "site.toml")
    lines, hint = problems([smallest], {"PPOCTL_SITE": str(site)})
    says = "changes results, which a site file must not: only the recipe defines a run"
    assert lines[:3] == [
        f"site.toml:1: `seed` {says}",
        f"site.toml:5: `rollout.max_new_tokens` {says}",  # although it repeats the recipe's value
        f"site.toml:7: `data.eval.more.format` {says}",
    ]
    assert hint == "move the line into the recipe"


def test_site_file_errors_name_their_line(write: Write, smallest: Path) -> None:
    site = write('[slurm]\npartition = "gpu"\nnodez = 2\n[slurm.options]\nexclude = 7\n', "site.toml")
    lines, _ = problems([smallest], {"PPOCTL_SITE": str(site)})
    assert lines == [
        "site.toml:5: `slurm.options.exclude` is `7`: must be text, in quotes (with --set: 'key=\"text\"')",
        "site.toml:3: unknown key `slurm.nodez`; did you mean `nodes`?",
    ]
    site.write_text("[slurm\n")
    assert problems([smallest], {"PPOCTL_SITE": str(site)})[0][0].startswith("site.toml:1: not valid TOML")


def test_site_paths_start_at_site_folder(write: Write, smallest: Path, tmp_path: Path) -> None:
    container = '[slurm.container]\nkind = "apptainer"\nimage = "$IMAGES/a.sif"\n'
    site = write('[slurm]\nsecrets = "secrets.sh"\n' + container, "etc/site.toml")
    environ = {"PPOCTL_SITE": str(site), "IMAGES": "/images"}
    table = load([smallest], (), environ).recipe.slurm
    assert table.secrets == str(tmp_path / "etc/secrets.sh")
    assert table.container.image == "/images/a.sif"  # type: ignore[union-attr]


def test_run_recipe_is_read_without_site_file(write: Write, smallest: Path) -> None:
    site = write(SITE, "site.toml")
    recipe = load([smallest], (), {"PPOCTL_SITE": str(site)}).recipe
    site.unlink()
    assert load([write(recipe_as_toml(recipe), "kept.toml")], (), {}).recipe == recipe
