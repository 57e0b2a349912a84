"""Exact match: is the response the answer? Imported in the children: standard library only."""

from ppoctl.rewards.verdict import Verdict


def score(response: str, truth: str, *, ignore_case: bool = False) -> Verdict:
    """1 where both are equal without the whitespace around them, else 0; raises ValueError on an empty truth, which
    an empty response would match."""
    wanted, given = truth.strip(), response.strip()
    if not wanted:
        raise ValueError("the ground truth is empty")
    if ignore_case:
        wanted, given = wanted.casefold(), given.casefold()
    return Verdict(float(given == wanted))
