"""The guard that keeps NaN out of everything later."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.errors import NonFiniteError


def require_finite(x: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"], what: str) -> None:
    """Raise NonFiniteError naming the first counted position that is NaN or infinite."""
    bad = mask & ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise NonFiniteError(
            f"{what} is `{float(x[row, column])}` (sequence {row}, response token {column})",
            hint="ppoctl status RUN  # nothing was trained on it; see its figures, lower a learning rate and resume",
        )
