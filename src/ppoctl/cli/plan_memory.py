"""The part of `ppoctl plan` about memory."""

import textwrap
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.recipe.memory.estimate import Memory
    from ppoctl.recipe.memory.residency import StageBytes
    from ppoctl.recipe.memory.trainer import RankBytes


_COMPONENTS = [
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("main weights", "main_weights"),
    ("moments", "moments"),
    ("reference", "reference"),
    ("gather buffer", "gather_buffer"),
    ("between calls", "resident"),
    ("update, on top", "update"),
    ("forward pass, on top", "forward"),
    ("at most", "peak"),
]


def print_memory(memory: "Memory") -> None:
    """What the largest rank of each role has, generator and driver, and whether each stage fits."""
    render.line()
    render.heading(f"memory (estimates, {memory.device.upper()})")
    ranks = [memory.roles[role].largest for role in ("actor", "critic")]
    render.table([("", *row) for row in _rank_rows(memory, *ranks)], ("", "of the largest rank", "actor", "critic"))
    render.line()
    render.table([("", *row) for row in _other_rows(memory)])
    render.line()
    room = "" if memory.place.bytes is None else f", {render.size(memory.place.bytes)}"
    render.heading(f"stages, on {memory.place.name}{room}")
    render.table([("", *_stage_row(memory, stage)) for stage in memory.stages])
    words = f"in all of them: {', '.join(_always(memory))}; nothing is moved out"
    render.line(textwrap.fill(words, 100, initial_indent="  ", subsequent_indent="  "))
    fullest = max(memory.stages, key=lambda stage: stage.bytes)
    if fullest.fits is False:
        render.line()
        render.heading(f"what is largest in {fullest.stage}, and what to do")
        render.table([("", item.name, render.size(item.bytes), item.lower) for item in fullest.largest])


def _rank_rows(memory: "Memory", actor: "RankBytes", critic: "RankBytes") -> list[tuple[str, ...]]:
    def both(name: str, attribute: str) -> tuple[str, ...]:
        sizes = [getattr(rank, attribute) for rank in (actor, critic)]
        return name, *(render.size(size) if size else "-" for size in sizes)

    rows: list[tuple[str, ...]] = [("parameters", f"{actor.parameters:,}", f"{critic.parameters:,}")]
    if max(len(role.ranks) for role in memory.roles.values()) > 1:
        rows.append(("pipeline stage", str(actor.stage), str(critic.stage)))
    rows += [both(name, key) for name, key in _COMPONENTS if getattr(actor, key) or getattr(critic, key)]
    resident = [render.size(memory.roles[role].resident) for role in ("actor", "critic")]
    return [*rows, ("all processes, between calls", *resident)]


def _other_rows(memory: "Memory") -> list[tuple[str, str]]:
    generator, driver = memory.generator, memory.driver
    room = f"{generator.kv_tokens:,} tokens, {generator.full_sequences} sequences of full length"
    rows = [
        ("generator", f"{render.size(generator.weights)} weights"),
        ("KV cache", f"{render.size(generator.kv_cache)}: {room}"),
        (
            "driver",
            f"{render.size(driver.samples)} for samples of a step, then {render.size(driver.records)} of records",
        ),
    ]
    if memory.buckets:
        largest = render.size(memory.largest_bucket)
        rows.append(("weights sent", f"{memory.buckets} buckets through the driver, the largest {largest}"))
    return rows


def _stage_row(memory: "Memory", stage: "StageBytes") -> tuple[str, str, str]:
    words = ""
    if memory.place.bytes is not None:
        words = "fits" if stage.fits else f"{render.size(stage.bytes - memory.place.bytes)} too much"
    return stage.stage, render.size(stage.bytes), words


def _always(memory: "Memory") -> list[str]:
    return [name for name in memory.stages[0].resident if all(name in stage.resident for stage in memory.stages)]
