"""The part of `ppoctl plan` about memory."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.plan.memory.estimate import Memory
    from ppoctl.plan.memory.node import NodeBytes
    from ppoctl.plan.memory.residency import Residency, StageBytes
    from ppoctl.plan.memory.trainer import RankBytes


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
    """Print the memory of the largest rank of each role, of generator and driver, and whether each stage fits."""
    render.line()
    render.heading(f"memory (estimates, {memory.device.upper()})")
    ranks = [memory.roles[role].largest for role in ("actor", "critic")]
    render.table([("", *row) for row in _rank_rows(memory, *ranks)], ("", "of the largest rank", "actor", "critic"))
    render.line()
    render.table([("", *row) for row in _other_rows(memory)])
    for assumption in memory.assumptions:
        _print_words(f"assumed: {assumption}")
    render.line()
    _print_stages(memory.places)
    _print_words(_always(memory))
    if memory.node is not None:
        _print_words(_host(memory.node))
    fullest = max(memory.places, key=lambda found: found.fullest.bytes)
    stage = fullest.fullest
    if memory.generator.full_sequences == 0:
        _print_words(_too_small_a_cache(memory))
    if stage.fits is False and fullest.place.bytes is not None and stage.bytes > fullest.place.bytes:
        render.line()
        where = f" on {fullest.place.name}" if len(memory.places) > 1 else ""
        render.heading(f"what is largest in {stage.stage}{where}, and what to do")
        render.table([("", item.name, render.size(item.bytes), item.lower) for item in stage.largest])
        if memory.taking_turns is not None:
            least = memory.taking_turns
            most = f"{render.size(least.bytes)} ({least.stage})"
            enough = "" if least.fits else ", still too much"
            render.line(f"  with `cluster.offload = true` no stage needs more than {most}{enough}")


def _print_words(words: str) -> None:
    render.line(textwrap.fill(words, 100, initial_indent="  ", subsequent_indent="  "))


def _print_stages(places: "Sequence[Residency]") -> None:
    room = "" if places[0].place.bytes is None else f", {render.size(places[0].place.bytes)}"
    several = len(places) > 1
    where = "each process on a GPU of its own" if several else f"on {places[0].place.name}"
    render.heading(f"stages, {where}{room}")
    headers = ["", "", *(name for found in places for name in (found.place.name, ""))] if several else []
    stages = zip(*(found.stages for found in places), strict=True)
    render.table(
        [("", row[0].stage, *(cell for stage in row for cell in _cells(places[0], stage))) for row in stages], headers
    )


def _rank_rows(memory: "Memory", actor: "RankBytes", critic: "RankBytes") -> list[tuple[str, ...]]:
    def both(name: str, attribute: str) -> tuple[str, ...]:
        sizes = [getattr(rank, attribute) for rank in (actor, critic)]
        return name, *(render.size(size) if size else "-" for size in sizes)

    rows: list[tuple[str, ...]] = [("parameters", f"{actor.parameters:,}", f"{critic.parameters:,}")]
    if max(len(role.ranks) for role in memory.roles.values()) > 1:
        rows.append(("pipeline stage", str(actor.stage), str(critic.stage)))
        rows.append(
            ("microbatches under way", f"{actor.microbatches_under_way:g}", f"{critic.microbatches_under_way:g}")
        )
    rows += [both(name, key) for name, key in _COMPONENTS if getattr(actor, key) or getattr(critic, key)]
    resident = [render.size(memory.roles[role].resident) for role in ("actor", "critic")]
    return [*rows, ("all processes, between calls", *resident)]


def _other_rows(memory: "Memory") -> list[tuple[str, str]]:
    generator, driver = memory.generator, memory.driver
    room = f"{generator.kv_tokens:,} tokens, {generator.full_sequences} sequences of full length"
    each = " in each process" if generator.processes > 1 else ""
    room += " in each engine" if generator.engines > 1 else ""
    rows = [
        ("generator", f"{render.size(generator.weights)} weights{each}"),
        ("KV cache", f"{render.size(generator.kv_cache)}{each}: {room}"),
        (
            "driver",
            f"{render.size(driver.samples)} for samples of a step, then {render.size(driver.records)} of records",
        ),
    ]
    sending = memory.sending
    if sending.buckets:
        largest = render.size(sending.largest)
        count = len(sending.buckets)
        buckets = f"{count} buckets, the largest {largest}" if count > 1 else f"one bucket, {largest}"
        rows.append(("weights sent", f"{buckets}, read by all engines"))
    return rows


def _too_small_a_cache(memory: "Memory") -> str:
    generator, needed = memory.generator, render.size(memory.generator.sequence_bytes)
    if memory.device == "cpu":
        return f"vLLM will not start: a sequence of full length takes {needed}; raise `generator.kv_cache_mib`"
    return (
        f"vLLM will not start: of its share of a GPU weights take {render.size(generator.weights)}, and a sequence "
        f"of full length {needed}; raise `generator.gpu_memory_frac` or `generator.tensor`"
    )


def _cells(found: "Residency", stage: "StageBytes") -> tuple[str, str]:
    room = found.place.bytes
    if room is not None and stage.bytes > room:
        return render.size(stage.bytes), f"{render.size(stage.bytes - room)} too much"
    words = {True: "fits", False: "no cache for one sequence", None: ""}
    return render.size(stage.bytes), words[stage.fits]


def _host(node: "NodeBytes") -> str:
    """A line on the fullest node, its largest part first."""
    parts = {
        "moved out": node.moved_out,
        "states being written": node.states,
        "rollouts in ranks": node.rollouts,
        "samples and records": node.driver,
        "weights on their way": node.sending,
        "published weights": node.published,
        "object store": node.object_store,
        "libraries": node.libraries,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])
    words = ", ".join(f"{render.size(size)} {name}" for name, size in largest if size)
    gpus = "1 GPU" if node.gpus == 1 else f"{node.gpus} GPUs"
    of = f" (the fullest of {node.nodes})" if node.nodes > 1 else ""
    return f"host memory of a node with {gpus}{of}, at most {render.size(node.total)}: {words}"


def _always(memory: "Memory") -> str:
    """A line on what is there in all stages, and what the others do meanwhile."""
    names = [
        item.name
        for found in memory.places
        for item in found.items
        if all(item.name in stage.resident for stage in found.stages)
    ]
    always = f"in all of them: {', '.join(dict.fromkeys(names))}; " if names else ""
    if not memory.moved_out:
        return f"{always}nothing is moved out"
    if memory.device == "cpu":
        return f"{always}what `cluster.offload` moves out of a CPU's memory is still in it"
    return f"{always}whoever is not at work is on the host, {render.size(memory.moved_out)} for each GPU at most"
