"""Rules for `[slurm]`: an option is set in one place, fits on one line, and no secret gets into a script."""

from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError
from ppoctl.recipe.loading.load import examine, load
from ppoctl.recipe.loading.rules import slurm_rules
from ppoctl.recipe.loading.rules.all_rules import rules_of
from ppoctl.recipe.loading.rules.slurm_rules import OWNED
from ppoctl.recipe.slurm_table import is_image_file, limit_s, memory_mib
from recipe.conftest import refusal

CASES: list[tuple[str, str, str, str | None]] = [
    (
        "check_sbatch_options",
        "slurm.options.partition=gpu",
        '--set: `--partition` cannot be set here: `slurm.partition`: `slurm.options.partition` = `"gpu"` (--set)',
        "change the recipe, or add `--set 'slurm.options={}' --set slurm.partition=gpu`",
    ),
    (
        "check_sbatch_options",
        "slurm.options.outp=x",  # Slurm accepts this prefix as --output
        "--set: `--output` cannot be set here: Slurm writes the output of a job to `logs/slurm-ID.log` of the run: "
        '`slurm.options.outp` = `"x"` (--set)',
        None,
    ),
    (
        "check_sbatch_options",
        "slurm.options.gres=gpu:a100:4",
        '--set: GPUs cannot be set here: `slurm.gpus_per_node`: `slurm.options.gres` = `"gpu:a100:4"` (--set)',
        "change the recipe, or add `--set 'slurm.options={}' --set slurm.gpus_per_node=4 --set slurm.gpu_type=a100`",
    ),
    (
        "check_sbatch_options",
        "slurm.options.gres='lscratch:1T,gpu'",
        '--set: GPUs cannot be set here: `slurm.gpus_per_node`: `slurm.options.gres` = `"lscratch:1T,gpu"` (--set)',
        "change the recipe, or add `--set 'slurm.options={gres = \"lscratch:1T\"}' --set slurm.gpus_per_node=1`",
    ),
    (
        "check_sbatch_options",
        "slurm.options.gres='gpu:a100:2,gpu:h100:2'",
        "--set: GPUs cannot be set here: `slurm.gpus_per_node`: `slurm.options.gres` = "
        '`"gpu:a100:2,gpu:h100:2"` (--set)',
        None,
    ),
    (
        "check_sbatch_options",
        "slurm.options.gpus-per-node='1g.5gb:7'",
        "--set: `--gpus-per-node` cannot be set here: `slurm.gpus_per_node`: `slurm.options.gpus-per-node` = "
        '`"1g.5gb:7"` (--set)',
        "change the recipe, or add `--set 'slurm.options={}' --set slurm.gpus_per_node=7 "
        "--set slurm.gpu_type=1g.5gb`",
    ),
    (
        "check_gpu_type",
        "slurm.gpu_type=h100",
        "--set: a GPU type is set, but without `slurm.gpus_per_node` the job requests no GPUs: `slurm.gpu_type` = "
        '`"h100"` '
        "(--set)",
        "change the recipe, or add `--set slurm.gpus_per_node=8`",
    ),
    (
        "check_gpu_type",
        "slurm.gpu_type='h100:4'",
        "--set: not a GPU type: letters, digits and `_.+-`; the number of GPUs is `slurm.gpus_per_node`: "
        "`slurm.gpu_type` = "
        '`"h100:4"` (--set)',
        "sinfo --format=%G",
    ),
    (
        "check_sbatch_options",
        "slurm.options.--exclude=node7",
        "--set: `--exclude` is not the long name of an option, such as `exclude`: lower-case letters, digits and "
        "`-`: "
        '`slurm.options.--exclude` = `"node7"` (--set)',
        "man sbatch",
    ),
    (
        "check_single_line",
        'slurm.options.comment="a\\nrm -rf x"',
        "--set: `slurm.options.comment` becomes one line of the batch script, but the value is not one line: "
        '`slurm.options.comment` = `"a\\nrm -rf x"` (--set)',
        None,
    ),
    (
        "check_single_line",
        'slurm.partition="a\\nb"',
        "--set: `slurm.partition` becomes one line of the batch script, but the value is not one line: "
        '`slurm.partition` = `"a\\nb"` (--set)',
        None,
    ),
    (
        "check_no_nul_bytes",
        'slurm.environment.WHERE="/a\\u0000"',
        "--set: `slurm.environment.WHERE` contains a NUL byte, which cannot be passed to a shell or a program: "
        '`slurm.environment.WHERE` = `"/a\\u0000"` (--set)',
        None,
    ),
    (
        "check_variable_names",
        "slurm.environment.NCCL-DEBUG=INFO",
        "--set: `NCCL-DEBUG` is not a variable name: letters, digits and `_`, not beginning with a digit: "
        '`slurm.environment.NCCL-DEBUG` = `"INFO"` (--set)',
        None,
    ),
    (
        "check_variable_names",
        "slurm.pass_on=['A=1']",
        "--set: `A=1` is not a variable name: letters, digits and `_`, not beginning with a digit: "
        '`slurm.pass_on` = `["A=1"]` (--set)',
        None,
    ),
    (
        "check_no_secret_in_job",
        "slurm.environment.HF_TOKEN=hf_123456",
        "--set: variable `HF_TOKEN` looks like a secret, but the script would show it",
        "write it into a file that you own, `chmod 600 FILE`, and --set slurm.secrets=FILE",
    ),
    (
        "check_no_secret_in_job",
        "slurm.pass_on=['WANDB_API_KEY']",
        "--set: variable `WANDB_API_KEY` looks like a secret, but Slurm would store it with the job",
        "write it into a file that you own, `chmod 600 FILE`, and --set slurm.secrets=FILE",
    ),
    (
        "check_no_secret_in_job",
        "slurm.setup=['module load x', 'export DB_PASSWORD=hunter2']",
        "--set: a line of `slurm.setup` contains a secret (`DB_PASSWORD`), but the script would show it",
        "write it into a file that you own, `chmod 600 FILE`, and --set slurm.secrets=FILE",
    ),
    (
        "check_time_limit",
        "slurm.time=4h",
        "--set: not a Slurm time limit; valid forms: `minutes`, `minutes:seconds`, `HH:MM:SS`, `days-HH` or "
        "`days-HH:MM:SS`: "
        '`slurm.time` = `"4h"` (--set)',
        "change the recipe, or add `--set slurm.time=04:00:00`",
    ),
    (
        "check_warning_time",
        "slurm.time=5",
        "--set: the warning, 300 s before the end, would come before a job of 300 s starts: "
        '`slurm.warn_s` = `300` (default), `slurm.time` = `"5"` (--set)',
        "change the recipe, or add `--set slurm.warn_s=150`",
    ),
    (
        "check_memory",
        "slurm.memory=lots",
        "--set: not an amount of memory: a whole number and K, M, G or T; `0`: all memory of a node: "
        '`slurm.memory` = `"lots"` (--set)',
        "change the recipe, or add `--set slurm.memory=200G`",
    ),
    (
        "check_requeues",
        "slurm={requeue=false, requeues=3}",
        "--set: requeuing is off, but `slurm.requeues` is 3: `slurm.requeues` = `3` (--set), "
        "`slurm.requeue` = `false` (--set)",
        "change the recipe, or add `--set slurm.requeue=true`",
    ),
    (
        "check_mounts",
        "slurm.container={kind='pyxis', image='i.sqsh', mounts=['data:/data']}",
        "--set: `data:/data` is not a mount: `/HOST/FOLDER:/FOLDER/INSIDE`, without a comma: "
        '`slurm.container.mounts` = `["data:/data"]` (--set)',
        None,
    ),
]


@pytest.mark.parametrize(("rule", "setting", "line", "hint"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_invalid_slurm_setting_raises(smallest: Path, rule: str, setting: str, line: str, hint: str | None) -> None:
    caught = refusal([smallest], [setting], {})
    assert (caught.message, caught.hint) == (line, hint)


def test_every_slurm_rule_has_a_failing_case() -> None:
    warns = {"check_booked_gpus_are_used"}  # the table below
    assert {rule for rule, *_ in CASES} | warns == {rule.__name__ for rule in rules_of(slurm_rules)}


@pytest.mark.parametrize(
    ("sets", "books", "fewer"),
    [
        # Nothing else is written: actor, critic and generator share one GPU.
        (["slurm.gpus_per_node=8"], "8 GPUs (1 node of 8), but the layout uses 1", "slurm.gpus_per_node=1"),
        (
            ["slurm.gpus_per_node=8", "actor.parallel.data=2"],
            "8 GPUs (1 node of 8), but the layout uses 2",
            "slurm.gpus_per_node=2",
        ),
        (
            ["slurm.gpus_per_node=8", "slurm.nodes=2", "actor.parallel.data=8"],
            "16 GPUs (2 nodes of 8), but the layout uses 8",
            "slurm.gpus_per_node=8 --set slurm.nodes=1",
        ),
        # Without `nodes` the layout sets it: 10 devices are on 2 nodes.
        (
            ["slurm.gpus_per_node=8", "generator.engines=10"],
            "16 GPUs (2 nodes of 8), but the layout uses 10",
            "slurm.gpus_per_node=5",
        ),
        (
            ["slurm.gpus_per_node=8", "cluster.placement=apart", "cluster.offload=[]"],
            "8 GPUs (1 node of 8), but the layout uses 3",
            "slurm.gpus_per_node=3",
        ),
    ],
)
def test_booked_gpus_that_layout_does_not_use_are_a_warning(
    smallest: Path, sets: list[str], books: str, fewer: str
) -> None:
    loaded, found = examine([smallest], sets, {})
    assert loaded is not None
    [each] = [finding for finding in found if "books" in finding.what]
    assert each.level == "warning"
    assert each.what.startswith(f"a job books {books}; `actor.parallel` and `generator.engines` set how many it uses")
    assert each.hint == f"change the recipe, or add `--set {fewer}`"
    cured = [text.removeprefix("--set ") for text in fewer.split(" --set ")]
    assert not [finding for finding in examine([smallest], [*sets, *cured], {})[1] if "books" in finding.what]


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["slurm.gpus_per_node=1"],
        ["slurm.gpus_per_node=8", "generator.engines=8"],
        ["slurm.nodes=2", "actor.parallel.data=2"],  # nodes without GPUs
        ["slurm.gpus_per_node=4", "generator.engines=8"],
        ["slurm.gpus_per_node=4", "slurm.nodes=1", "generator.engines=8"],  # too few, which Slurm's check refuses
    ],
)
def test_booked_gpus_that_layout_uses_are_not_a_warning(smallest: Path, sets: list[str]) -> None:
    assert not [finding for finding in examine([smallest], sets, {})[1] if "books" in finding.what]


@pytest.mark.parametrize("option", sorted(OWNED))
def test_sbatch_option_owned_by_ppoctl_raises(smallest: Path, option: str) -> None:
    with pytest.raises(RecipeError, match=f"`--{option}` cannot be set here"):
        load([smallest], [f"slurm.options.{option}=1"], {})


def test_valid_slurm_settings_are_accepted(smallest: Path) -> None:
    sets = [
        "slurm.options={exclude='node[7-9]', exclusive='', mail-type='END,FAIL', gres='lscratch:100', time-min='10'}",
        "slurm.environment={TOKENIZERS_PARALLELISM='false', SSH_KEY_PATH='/k', QUOTED='a\"$b\\nc'}",
        "slurm.setup=['module load cuda', 'export HF_TOKEN=$(cat /secret)', 'export LD_LIBRARY_PATH=/x:$L']",
        "slurm.pass_on=['LANG']",
        "slurm.memory=0",
        "slurm.time=1-12",
        "slurm.container={kind='pyxis', image='nvcr.io#nvidia/pytorch:25.01-py3', mounts=['/data:/data:ro']}",
    ]
    table = load([smallest], sets, {}).recipe.slurm
    assert table.options["exclude"] == "node[7-9]"
    assert table.environment["QUOTED"] == 'a"$b\\nc'


def test_sbatch_options_are_kept_as_text(smallest: Path) -> None:
    loaded = load([smallest], ["slurm.options.nice=100", "slurm.environment.OMP_NUM_THREADS=8"], {})
    assert loaded.recipe.slurm.options == {"nice": "100"}
    assert loaded.recipe.slurm.environment == {"OMP_NUM_THREADS": "8"}
    assert loaded.origins["slurm.options.nice"] == "--set"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("04:00:00", 14400),
        ("2-0", 172800),
        ("1-12:30", 131400),
        ("1-00:00:05", 86405),
        ("UNLIMITED", float("inf")),
        ("0", float("inf")),
    ],
)
def test_time_limit_is_parsed_like_slurm(text: str, seconds: float) -> None:
    assert limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-5", "1-", "1-2:3:4:5", " 5", "5\n"])
def test_invalid_time_limit_raises(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time limit"):
        limit_s(text)


@pytest.mark.parametrize(("text", "mib"), [("200G", 204800), ("4000", 4000), ("512K", 0.5), ("1tb", 2**20), ("0", 0)])
def test_memory_is_parsed_like_slurm(text: str, mib: float) -> None:
    assert memory_mib(text) == mib


def test_image_is_a_file_or_a_registry_name() -> None:
    assert all(map(is_image_file, ("/i/x", "~/x.sqsh", "$IMAGES/x", "./x", "x.sif", "images/x.sqsh")))
    assert not any(map(is_image_file, ("nvcr.io#nvidia/pytorch:25.01", "docker://ubuntu:24.04", "ubuntu")))
