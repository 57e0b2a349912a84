"""Findings, as every command prints them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ppoctl.cli import render

if TYPE_CHECKING:
    from ppoctl.core.finding import Finding


def print_findings(findings: "Iterable[Finding]", *, with_where: bool = True) -> None:
    """Print findings as data: a row with the level, the origin or the thing that was checked, and what was found."""
    render.table(
        [(each.level.value, *([each.where or each.kind] if with_where else []), each.in_a_line) for each in findings]
    )


def print_causes(findings: "Iterable[tuple[Finding, str | None]]") -> None:
    """Print findings as paragraphs: what was found, what to change, and what shows it, if anything does."""
    for finding, shown in findings:
        render.prose(f"{finding.level.value}: {finding}")
        for label, text in (("change", finding.hint), ("sample", shown)):
            if text is not None:
                render.prose(f"    {label}: {render.printable(text)}")
