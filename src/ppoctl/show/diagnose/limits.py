"""The limits that truncate responses: which one it was, and settings that raise it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ppoctl.core.errors import PpoctlError
from ppoctl.show.diagnose.curves import Curves
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.stored_samples import StepRecords, steps_with_rollouts

TURNS, NEW_TOKENS = "environment.turns", "rollout.max_new_tokens"
PER_TURN, EPISODE_TOKENS, WINDOW = "environment.tokens_per_turn", "environment.tokens", "rollout.max_window_tokens"
OF_TOKENS = (PER_TURN, NEW_TOKENS, EPISODE_TOKENS, WINDOW)
"""Limits of tokens; a limit includes the tokens that those before it count."""


def read(recorded: RecordedRun) -> Mapping[str, int]:
    """Return key -> number of responses that it truncated, in the newest step with records; empty: no records."""
    steps = steps_with_rollouts(recorded)
    if not steps:
        return {}
    try:
        records = StepRecords.read(recorded, steps[-1], per_token=False)
        rows = [records.row(number) for number in range(records.num_seqs)]
        run = Curves(str(recorded.paths.root), recorded.recipe, {})
        return Counter(
            limit(run, len(records.prompt_tokens(row.row)), row.tokens, records.rollouts.value("episodes", row.row))
            for row in rows
            if row.finish == "truncated"
        )
    except PpoctlError:  # the records are being written or removed
        return {}


def limit(run: Curves, prompt_tokens: int, tokens: int, episode: Mapping[str, Any] | None) -> str:
    """Return the key of the limit that truncated a response, by its length in tokens and its `Episode.as_json`."""
    turns = [] if episode is None else [turn["generated"] for turn in episode["turns"]]
    if episode is not None and episode["end"] == "turns":
        return TURNS
    if (sum(turns) if turns else tokens) >= run.key(NEW_TOKENS):
        return NEW_TOKENS
    if turns and run.key(PER_TURN) is not None and turns[-1] >= run.key(PER_TURN):
        return PER_TURN
    if episode is None:
        return WINDOW
    window = run.key(WINDOW)
    return WINDOW if window is not None and window - prompt_tokens < run.key(EPISODE_TOKENS) else EPISODE_TOKENS


def main_limit(run: Curves, turn_limited: float) -> str | None:
    """Return the key of the limit that truncated most responses; None if no records show it and metrics do not
    either. `turn_limited` is the fraction of the truncated responses that the limit of turns ended."""
    if counts := {key: count for key, count in run.limits.items() if run.key(key) is not None}:
        return max(counts, key=lambda key: counts[key])
    if turn_limited >= 0.5:
        return TURNS
    known = [key for key in OF_TOKENS if run.key(key) is not None]
    return known[0] if known == [NEW_TOKENS] else None


def raised(run: Curves, key: str | None, factor: int) -> str:
    """Return the options that raise a limit and, if they would be the next limit, those that include it. Without a
    key: all limits of tokens, because any of them may be the one."""
    if key == TURNS:
        return run.set(key, factor * run.key(key))
    old = {each: run.key(each) for each in OF_TOKENS if run.key(each) is not None}
    new = {each: factor * tokens for each, tokens in old.items() if key in (None, each)}
    if key is not None:
        wider, more = OF_TOKENS[OF_TOKENS.index(key) + 1 :], new[key] - old[key]
        new |= {each: old[each] + more for each in wider if each in old and old[each] - old[key] < more}
    if WINDOW in new:  # a window that no sequence reaches is an error
        response = EPISODE_TOKENS if EPISODE_TOKENS in old else NEW_TOKENS
        longest = run.key("rollout.max_prompt_tokens") + new.get(response, old[response])
        new[WINDOW] = min(new[WINDOW], longest)
    return " ".join(run.set(each, tokens) for each, tokens in new.items())
