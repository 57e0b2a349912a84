"""`ppoctl plan --fit`: the fastest recipes that fit on a number of GPUs, each as keys to set."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.cli import render
from ppoctl.core import units
from ppoctl.core.errors import OutOfMemoryError, as_typed, quoted

if TYPE_CHECKING:
    from ppoctl.plan.fit.proposed import Proposal, Proposals
    from ppoctl.plan.memory.pools import Pool
    from ppoctl.recipe.loading.load import Loaded

LONG_S = 5.0
"""Seconds after which the command prints its progress."""


def print_proposals(
    files: Sequence[Path], sets: Sequence[str], loaded: "Loaded", gib: float, gpus: int | None, *, as_json: bool
) -> None:
    """Print the proposals for GPUs of `gib` GiB. Raises OutOfMemoryError if there are none."""
    from ppoctl.start.preflight.fitting import proposals_for

    proposals = proposals_for(loaded, sets, gib, gpus, _SearchProgress().notify)
    render.passing()
    if as_json:
        render.json(_as_json(proposals, loaded.recipe.name, gib))
    else:
        _print(proposals, loaded.recipe.name, gib)
    if not proposals.found:
        raise _misfit(proposals, gib, as_typed("plan", files, sets))


class _SearchProgress:
    """Progress of the search: shown continuously on a terminal, otherwise as a line when the search takes long."""

    def __init__(self) -> None:
        self._began, self._printed = time.monotonic(), ""

    def notify(self, what: str) -> None:
        text = f"searching {what}"
        render.passing(text)
        if not render.on_terminal() and text != self._printed and time.monotonic() - self._began > LONG_S:
            render.print_stderr(text)
            self._printed = text


def _print(proposals: "Proposals", name: str, gib: float) -> None:
    from ppoctl.plan.fit.search import MARGIN_GIB

    gpus, found = proposals.gpus, proposals.found
    where = f"{gpus} GPU{'s' if gpus > 1 else ''} of {gib:g} GiB"
    count = f"{len(found)} recipe{'s fit' if len(found) != 1 else ' fits'}" if found else "no recipe fits"
    render.heading(f"{name} on {where}: {count} with {MARGIN_GIB:g} GiB to spare")
    if not found and proposals.nearest is not None:
        render.line("the nearest:")
        _print_one(proposals.nearest, proposals, "")
    for number, proposal in enumerate(found, 1):
        _print_one(proposal, proposals, f"{number}. ")
    if found:
        own = proposals.own_gpus
        render.line()
        render.prose(
            f"`x` is the estimated time of a step, as a multiple of the step of the recipe as it is "
            f"({own} GPU{'s' if own > 1 else ''}). It is computed from assumed speeds (docs/fit.md), so compare only "
            "ratios."
        )
        render.prose(
            f"{MARGIN_GIB:g} GiB of each GPU stay free, because the estimate of memory is not exact. `time` has the "
            "percentages of a step that saving memory costs (recomputation, offload, optimizer on the CPU, "
            "communication, small microbatches), and that of decoding: more sequences at once in each engine make it "
            "shorter."
        )
        if proposals.as_it_is.overlaps:
            render.prose(
                "With `rollout.ahead`, decoding and all other work run at the same time, on GPUs that they share. So "
                "the time of a step is a lower bound: a step takes longer as far as both use the same part of a GPU."
            )


def _print_one(proposal: "Proposal", proposals: "Proposals", number: str) -> None:
    from ppoctl.start.preflight.fitting import settings_of, toml_of

    ratio = proposal.seconds.total / proposals.as_it_is.total
    results = "changes the results" if proposal.results else "does not change the results"
    render.line()
    render.heading(f"{number}{ratio:.2f} x, {results}")
    pool = _fullest(proposal)
    rows = [("memory", f"{units.size(pool.fullest.bytes)} in `{pool.fullest.stage}`, on {pool.name}")]
    if proposal.memory.node is not None:
        rows.append(("host", f"{units.size(proposal.memory.node.fullest.bytes)} on {proposal.memory.node.name}"))
    rows.append(("time", ", ".join(_shares(proposal))))
    if proposal.seconds.overlaps:
        rows.append(("overlap", "decoding runs beside all other work: the step is the longer of both"))
    rows += [("results", text) for text in proposal.results]
    if not proposal.changes:
        rows.append(("changes", "none: the recipe fits as it is"))
    render.table([("", *row) for row in rows])
    if proposal.changes:
        render.line("  " + " ".join(f"--set {quoted(text)}" for text in settings_of(proposal.changes)))
        render.line("  as a recipe file after yours:")
        for text in toml_of(proposal.changes):
            render.line(f"    {text}")


def _fullest(proposal: "Proposal") -> "Pool":
    return max(proposal.memory.places, key=lambda pool: pool.fullest.bytes)


def _shares(proposal: "Proposal") -> Iterator[str]:
    """Yield the fractions of the step that settings for memory cost."""
    seconds = proposal.seconds
    for name in ("recomputation", "offload", "optimizer", "communication", "microbatches"):
        share = getattr(seconds, name) / seconds.total
        if share >= 0.005:
            yield f"{name} {share:.0%}"
    at_once = f"{proposal.at_once} full sequence{'s' * (proposal.at_once > 1)}"
    yield f"decoding {seconds.decoding / seconds.total:.0%}, {at_once} at once in each engine"


def _misfit(proposals: "Proposals", gib: float, command: str) -> OutOfMemoryError:
    more = f"{command} --fit {gib:g} --gpus {2 * proposals.gpus}"
    where = f"{proposals.gpus} GPU{'s' if proposals.gpus > 1 else ''} of {gib:g} GiB"
    if proposals.nearest is None:
        return OutOfMemoryError(f"no recipe fits on {where}: the weights of an engine (vLLM) do not fit", hint=more)
    from ppoctl.plan.fit.search import MARGIN_GIB
    from ppoctl.plan.memory.assumptions import GIB

    pool = _fullest(proposals.nearest)
    missing = pool.fullest.bytes - (gib - MARGIN_GIB) * GIB
    return OutOfMemoryError(
        f"no recipe fits on {where}: the nearest needs {units.size(pool.fullest.bytes)} in `{pool.fullest.stage}`, "
        f"{units.size(int(missing))} more than there are with {MARGIN_GIB:g} GiB to spare",
        hint=more,
    )


def _as_json(proposals: "Proposals", name: str, gib: float) -> dict[str, Any]:
    from ppoctl.plan.fit.search import MARGIN_GIB

    nearest = proposals.nearest
    return {
        "name": name,
        "gpu_gib": gib,
        "gpus": proposals.gpus,
        "spare_gib": MARGIN_GIB,
        "proposals": [_proposal_as_json(each, proposals) for each in proposals.found],
        "nearest": None if nearest is None else _proposal_as_json(nearest, proposals),
    }


def _proposal_as_json(proposal: "Proposal", proposals: "Proposals") -> dict[str, Any]:
    from ppoctl.start.preflight.fitting import settings_of, toml_of

    stage, node = _fullest(proposal).fullest, proposal.memory.node
    return {
        "set": settings_of(proposal.changes),
        "toml": "".join(f"{text}\n" for text in toml_of(proposal.changes)),
        "time": proposal.seconds.total / proposals.as_it_is.total,
        "seconds": {**proposal.seconds.kinds, "total": proposal.seconds.total},
        "decoding_overlaps": proposal.seconds.overlaps,
        "changes_results": list(proposal.results),
        "stage": stage.stage,
        "gpu_bytes": stage.bytes,
        "host_bytes": None if node is None else node.fullest.bytes,
        "full_sequences_at_once": proposal.at_once,
    }
