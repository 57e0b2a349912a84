"""`ppoctl convert-ckpt`: Hugging Face <-> Megatron, verified."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ppoctl import units
from ppoctl.cli import render
from ppoctl.cli.options import JsonOption, found_run, is_run, run_names
from ppoctl.errors import RecipeError


def _found(source: str) -> str:
    """What was meant: the run `runs/q1` for `q1`, unless that is something here; else a hub id may be."""
    run = found_run(Path(source))
    return str(run) if is_run(run) and not Path(source).exists() else source


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A run, a Megatron torch_dist folder, a Hugging Face folder or hub id.",
        callback=_found,
        autocompletion=run_names,
    ),
]

Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="MODEL",
        help="Config and tokenizer of a Megatron folder: a Hugging Face folder of the model.",
    ),
]
Cast = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="float32, bfloat16 or float16: cast the weights; default: as they are."
    ),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Also read pytorch_model.bin, as weights only: no code in it runs.")
]


def convert_ckpt(
    source: SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist.")],
    to: Annotated[Literal["hf", "megatron"], typer.Option("--to", help="Format of OUT.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Saved step of a run; default: the last.")
    ] = None,
    role: Annotated[
        Literal["actor", "critic"] | None,
        typer.Option("--role", help="Role of a run; default: what SOURCE is, of a run its actor."),
    ] = None,
    like: Like = None,
    dtype: Cast = None,
    shard_gib: Annotated[
        float, typer.Option("--shard-gib", metavar="GIB", help="Most GiB in one weight file.")
    ] = 4.0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Check nothing; the report says so.")] = False,
    no_parity: Annotated[
        bool,
        typer.Option("--no-parity", help="Check files, but not what the model computes (that takes its memory)."),
    ] = False,
    allow_pickle: AllowPickle = False,
    json: JsonOption = False,
) -> None:
    """Turn a checkpoint into the other format, and prove it. The output is read again and held against SOURCE, tensor
    by tensor, and both must say the same of fixed prompts. Nothing is left at OUT if anything fails."""
    if shard_gib <= 0:
        raise RecipeError(f"`--shard-gib {shard_gib:g}` must be above 0", hint="--shard-gib 4")
    from ppoctl.store.folders import require_new

    require_new(out, "folder")  # before what follows is imported, which takes seconds
    from ppoctl.convert.command.convert_ckpt import REPORT, ConvertRequest, convert

    asked = ConvertRequest(
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
    report = convert(asked, render.print_stderr)
    if json:
        render.json({"out": str(out), **{name: value for name, value in report.items() if name != "tensors"}})
        return
    _tell(report)
    render.line(f"{'verified' if report['verified'] else 'NOT VERIFIED'}: {out}")
    render.print_stderr(f"report: {out / REPORT}")


def _tell(report: dict[str, Any]) -> None:
    dtype = f"cast to {report['dtype']}" if report["cast"] else report["dtype"]
    size = f"{units.number(report['parameters'])} parameters, {dtype}"
    render.line(f"{report['source']['says']}: {report['family']} {report['role']}, {size}")
    rows = []
    for check in report["checks"]:
        says = check["says"]
        if check["largest_gap"] is not None:
            says = f"largest gap {check['largest_gap']:.2g}, allowed {check['allowed']:.2g}"
        rows.append((check["name"], check["count"], says))
    if rows:
        render.line()
        render.table(rows, ("check", "compared", ""))
        render.line()
    for option in report["skipped"]:
        render.line(f"left out: {option}")
