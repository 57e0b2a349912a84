"""The sections of `ppoctl plan --full` about memory."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render
from ppoctl.core import units

if TYPE_CHECKING:
    from ppoctl.plan.memory.estimate import Memory
    from ppoctl.plan.memory.pools import Pool, StageBytes
    from ppoctl.plan.memory.residency import MemoryItem
    from ppoctl.recipe.schema import Recipe


_COMPONENTS = {
    "weights": "weights",
    "gradients": "gradients",
    "main weights": "main_weights",
    "moments": "moments",
    "of these on the host": "host_optimizer",
    "staging on the host": "host_staging",
    "moved per optimizer step": "moved",
    "merge of adapters, in addition": "merged",
    "reference": "reference",
    "gather buffer": "gather_buffer",
    "between calls": "resident",
    "update, in addition": "update",
    "forward pass, in addition": "forward",
    "peak": "peak",
}
"""Label on the screen -> attribute of `RankBytes`."""


def print_memory(recipe: "Recipe", memory: "Memory") -> None:
    """Print whether each stage fits, and the memory of generator, driver and the largest rank of each role."""
    from ppoctl.plan.memory.estimate import too_small_a_cache

    render.line()
    render.heading(f"memory (estimates, {memory.device.upper()})")
    render.table([("", *row) for row in _rank_rows(memory)], ("", "of the largest rank", *memory.roles))
    render.line()
    render.table([("", *row) for row in _other_rows(recipe, memory)])
    for assumption in memory.assumptions:
        _print_words(f"assumed: {assumption}")
    for warning in memory.warnings:
        _print_words(f"warning: {warning}")
    render.line()
    _print_stages(memory.places)
    _print_words(_leaving(recipe.cluster.offload, memory.device))
    for found in memory.places:
        _print_items(f"contents of {found.name}", found)
    if memory.node is not None:
        most = units.size(memory.node.fullest.bytes)
        _print_items(f"host memory of {memory.node.name}, at most {most}", memory.node)
    no_cache = too_small_a_cache(memory)
    if no_cache is not None:
        _print_words(f"{no_cache.message}; {no_cache.hint}")
    _print_too_much(memory)


def _print_words(words: str) -> None:
    render.line(textwrap.fill(words, 100, initial_indent="  ", subsequent_indent="  "))


def _print_stages(places: "Sequence[Pool]") -> None:
    room = "" if places[0].room is None else f", {units.size(places[0].room)}"
    several = len(places) > 1
    where = "each process on its own GPU" if several else f"on {places[0].name}"
    render.heading(f"stages, {where}{room}")
    headers = ["", "", *(name for found in places for name in (found.name, ""))] if several else []
    stages = zip(*(found.stages for found in places), strict=True)
    render.table(
        [("", row[0].stage, *(cell for stage in row for cell in _cells(places[0].room, stage))) for row in stages],
        headers,
    )


def _cells(room: int | None, stage: "StageBytes") -> tuple[str, str]:
    if room is not None and stage.bytes > room:
        return units.size(stage.bytes), f"{units.size(stage.bytes - room)} too much"
    return units.size(stage.bytes), {True: "fits", False: "no cache for one sequence", None: ""}[stage.fits]


def _print_items(heading: str, pool: "Pool") -> None:
    """Print every item of a memory pool: its bytes, and the stages during which it is in memory."""
    sizes = Counter[tuple[str, str]]()
    for item in pool.items:
        sizes[item.name, _when(pool, item)] += item.bytes
    render.line()
    render.heading(heading)
    render.table([("", name, units.size(size), when) for (name, when), size in sizes.items()])


def _when(pool: "Pool", item: "MemoryItem") -> str:
    others = [stage.stage for stage in pool.stages if not item.is_in(stage.stage)]
    if item.stages is None or not others:
        return "always"
    return ", ".join(item.stages) if len(others) >= len(item.stages) else f"all except {', '.join(others)}"


def _print_too_much(memory: "Memory") -> None:
    """If the fullest stage does not fit, print its largest items and the keys that reduce them."""
    fullest = max(memory.places, key=lambda found: found.fullest.bytes)
    stage = fullest.fullest
    if fullest.room is None or stage.bytes <= fullest.room:
        return
    render.line()
    where = f" on {fullest.name}" if len(memory.places) > 1 else ""
    render.heading(f"largest items in {stage.stage}{where}, and what to do")
    render.table([("", item.name, units.size(item.bytes), item.lower) for item in fullest.largest(stage.stage)[:4]])
    least = memory.taking_turns
    if least is not None:
        most = f"{units.size(least.bytes)} ({least.stage})"
        enough = "" if least.fits else ", still too much"
        render.line(f"  if every role is offloaded, no stage needs more than {most}{enough}:")
        roles = json.dumps([*memory.roles, "generator", *(["reward"] if memory.scoring else [])])
        render.line(f"    --set 'cluster.offload={roles}'")


def _rank_rows(memory: "Memory") -> list[tuple[str, ...]]:
    ranks = [role.largest for role in memory.roles.values()]
    rows: list[tuple[str, ...]] = [("parameters", *(f"{rank.parameters:,}" for rank in ranks))]
    if any(rank.trained_parameters < rank.parameters for rank in ranks):
        rows.append(("trained parameters", *(f"{rank.trained_parameters:,}" for rank in ranks)))
    if max(len(role.ranks) for role in memory.roles.values()) > 1:
        rows.append(("pipeline stage", *(str(rank.stage) for rank in ranks)))
        rows.append(("microbatches in flight", *(f"{rank.microbatches_under_way:g}" for rank in ranks)))
    for name, figure in _COMPONENTS.items():
        found = [getattr(rank, figure) for rank in ranks]
        if any(found):
            rows.append((name, *(units.size(size) if size else "-" for size in found)))
    return [
        *rows,
        ("all processes, between calls", *(units.size(role.resident) for role in memory.roles.values())),
    ]


def _other_rows(recipe: "Recipe", memory: "Memory") -> list[tuple[str, str]]:
    from ppoctl.recipe.parallel import engine_count

    generator, driver, buckets = memory.generator, memory.driver, memory.sending.buckets
    room = f"{generator.kv_tokens:,} tokens, {generator.full_sequences} sequences of full length"
    engines = engine_count(recipe.generator)
    each = " in each process" if engines * recipe.generator.tensor > 1 else ""
    room += " in each engine" if engines > 1 else ""
    samples = f"{units.size(driver.samples)} for samples of a step, then {units.size(driver.records)} of records"
    rows = [
        *(
            (role, f"{units.size(of.weights)} weights and {units.size(of.forward)} while scoring, in each process")
            for role, of in memory.scoring.items()
        ),
        ("generator", f"{units.size(generator.weights)} weights{each}"),
        ("KV cache", f"{units.size(generator.kv_cache)}{each}: {room}"),
        ("driver", samples),
    ]
    if buckets:
        largest = units.size(memory.sending.largest)
        count = f"{len(buckets)} buckets, the largest" if len(buckets) > 1 else "one bucket,"
        rows.append(("weights sent", f"{count} {largest}, read by all engines"))
    return rows


def _leaving(roles: Sequence[str], device: str) -> str:
    """Return a sentence that lists the roles which are offloaded between their stages."""
    if not roles:
        return "no role is offloaded"
    if device == "cpu":
        return "`cluster.offload` frees no memory without a GPU"
    return f"offloaded while others compute: {', '.join(roles)}"
