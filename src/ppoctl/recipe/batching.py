"""How much a microbatch may hold."""

from ppoctl.recipe.algorithm import BySequences, ByTokens


def limit(batching: BySequences | ByTokens, *, with_gradient: bool) -> tuple[str, int]:
    """The key that says how much a microbatch may hold, and how much."""
    names = (
        ("forward_microbatch_seqs", "microbatch_seqs")
        if isinstance(batching, BySequences)
        else ("forward_max_tokens_per_microbatch", "max_tokens_per_microbatch")
    )
    key = names[1] if with_gradient or getattr(batching, names[0]) is None else names[0]
    return key, getattr(batching, key)
