"""Conversion of torch's out-of-memory errors to errors that name the recipe keys that reduce memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.sizes import microbatch_limit
from ppoctl.core.errors import OutOfMemoryError


@contextmanager
def named_out_of_memory(role: str, batching: BySequences | ByTokens, *, with_gradient: bool) -> Iterator[None]:
    """Context of a forward pass of this role or, with `with_gradient`, of an update. Raises OutOfMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        key, most = microbatch_limit(batching, with_gradient=with_gradient)
        message = f"the {role} ran out of device memory with `{role}.batching.{key} = {most}`"
        hint = f"ppoctl resume RUN --set {role}.batching.{key}={max(most // 2, 1)}  # results do not change"
        if role.startswith("reward"):
            message = f"the reward model ran out of device memory with `{role}.max_tokens = {most}`"
            hint = f"""ppoctl resume RUN --set '{role}.parallel={{"tensor" = 2}}'"""
        raise OutOfMemoryError(message, hint=hint) from error
