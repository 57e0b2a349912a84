"""`ppoctl convert-ckpt`: convert a checkpoint between Hugging Face and Megatron format, and verify it."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, found_run, is_run, run_names
from ppoctl.core import units
from ppoctl.core.errors import RecipeError


def _found(source: str) -> str:
    """Return the run `runs/q1` for `q1`, unless a local path is called `q1`; return other names as they are.

    A name that is neither a run nor a local path may be a hub id.
    """
    run = found_run(Path(source))
    return str(run) if is_run(run) and not Path(source).exists() else source


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A run, a Megatron torch_dist folder, a Hugging Face folder, or a hub id.",
        callback=_found,
        autocompletion=run_names,
    ),
]

Role = Annotated[
    str | None,
    typer.Option(
        "--role", metavar="ROLE", help="Role to convert. Default: actor for a run, otherwise the role of SOURCE."
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="MODEL",
        help="Hugging Face folder or hub id with config and tokenizer of a Megatron folder, and its frozen weights.",
    ),
]
Cast = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="Cast the weights to float32, bfloat16 or float16. Default: no cast."
    ),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Also read pytorch_model.bin, as weights only; no code in it is run.")
]


def convert_ckpt(
    source: SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create; it must not exist.")],
    to: Annotated[
        Literal["hf", "megatron", "peft"], typer.Option("--to", help="Format of OUT. peft: only the adapters.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Saved step of a run. Default: the last.")
    ] = None,
    role: Role = None,
    like: Like = None,
    dtype: Cast = None,
    shard_gib: Annotated[
        float, typer.Option("--shard-gib", metavar="GIB", help="Maximum size of a weight file, in GiB.")
    ] = 4.0,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip all checks. The report lists the skipped checks.")
    ] = False,
    no_parity: Annotated[
        bool,
        typer.Option(
            "--no-parity",
            help="Compare only tensors. Skip the comparison of outputs, which loads the model into memory.",
        ),
    ] = False,
    allow_pickle: AllowPickle = False,
    json: JsonOption = False,
) -> None:
    """Convert a checkpoint between Hugging Face and Megatron format, and verify it. The converted checkpoint is read
    back and compared with SOURCE, tensor by tensor. Both models must return the same outputs for fixed prompts. If a
    step fails, OUT is not created."""
    if shard_gib <= 0:
        raise RecipeError(f"`--shard-gib {shard_gib:g}` must be above 0", hint="--shard-gib 4")
    from ppoctl.store.writable_folders import require_new

    require_new(out, "folder")  # before the imports below, which take seconds
    from ppoctl.run.conversion.convert_ckpt import REPORT, ConvertRequest, convert

    request = ConvertRequest(
        source=source,
        to=to,
        out=out,
        role=role,
        step=step,
        like=like,
        dtype=dtype,
        shard_gib=shard_gib,
        verify=not no_verify,
        parity=not no_parity,
        allow_pickle=allow_pickle,
    )
    report = convert(request, render.print_stderr)
    if json:
        render.json({"out": str(out), **{name: value for name, value in report.items() if name != "tensors"}})
        return
    _print_report(report)
    render.line(f"{'verified' if report['verified'] else 'NOT VERIFIED'}: {out}")
    render.print_stderr(f"report: {out / REPORT}")


def _print_report(report: dict[str, Any]) -> None:
    dtype = f"cast to {report['dtype']}" if report["cast"] else report["dtype"]
    size = f"{units.number(report['parameters'])} parameters, {dtype}"
    render.line(f"{report['source']['says']}: {report['family']} {report['role']}, {size}")
    rows = []
    for check in report["checks"]:
        result = check["says"]
        if check["largest_gap"] is not None:
            result = f"largest difference {check['largest_gap']:.2g}, allowed {check['allowed']:.2g}"
        rows.append((check["name"], check["count"], result))
    if rows:
        render.line()
        render.table(rows, ("check", "compared", ""))
        render.line()
    for option in report["skipped"]:
        render.line(f"left out: {option}")
