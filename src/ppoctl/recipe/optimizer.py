"""The recipe's tables of the optimizer and its schedule."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import RESULTS, AtLeastOne, Fraction, NotNegative, Positive, Table


class OptimizerTable(Table):
    """AdamW and its learning-rate schedule. Everything is counted in optimizer steps."""

    lr: Annotated[float, RESULTS, Positive]
    """Peak learning rate."""
    weight_decay: Annotated[float, RESULTS, NotNegative] = 0.0
    """Decoupled weight decay; biases and norms have none."""
    beta1: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment (Megatron-Core's `adam_beta1`)."""
    beta2: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment (Megatron-Core's `adam_beta2`)."""
    eps: Annotated[float, RESULTS, Positive] = 1e-8
    """Number added to the root of AdamW's second moment (Megatron-Core's `adam_eps`)."""
    grad_clip: Annotated[float, RESULTS, NotNegative] = 1.0
    """Largest global gradient norm (Megatron-Core's `clip_grad`); 0: no clipping."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], RESULTS] = "constant"
    """Shape of the learning rate after warm-up."""
    lr_warmup_updates: Annotated[int, RESULTS, NotNegative] = 0
    """Optimizer steps of linear warm-up; the rate of the first is above 0."""
    lr_decay_updates: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Optimizer step at which linear and cosine reach their minimum; absent: the last one planned."""
    lr_min_frac: Annotated[float, RESULTS, Fraction] = 0.0
    """Minimum of linear and cosine schedules, as a share of lr."""
