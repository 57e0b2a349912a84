"""Recipe tables of the optimizer and its learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, Fraction, NotNegative, Positive, Table

OptimizerPlace = Literal["device", "cpu"]


class OptimizerTable(Table):
    """AdamW and its learning-rate schedule. The lengths of warm-up and decay are counted in optimizer steps, also
    with `lr_ticks = "step"`.

    Formula: g = gradient x min(1, grad_clip / its norm); m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w -= lr_t (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)
    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101)
    Default of: OpenRLHF, trlX (0.9 and 0.95); verl and NeMo-RL use 0.999 and a weight decay of 0.01 and 0.1
    Figures: policy/grad_norm, policy/lr, value/grad_norm, value/lr
    """

    lr: Annotated[float, RESULTS, Positive]
    """Peak learning rate."""
    weight_decay: Annotated[float, RESULTS, NotNegative] = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    beta1: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment (Megatron-Core's `adam_beta1`)."""
    beta2: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment (Megatron-Core's `adam_beta2`)."""
    eps: Annotated[float, RESULTS, Positive] = 1e-8
    """Number added to the square root of AdamW's second moment (Megatron-Core's `adam_eps`)."""
    grad_clip: Annotated[float, RESULTS, NotNegative] = 1.0
    """Largest global gradient norm (Megatron-Core's `clip_grad`); 0: no clipping."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], RESULTS] = "constant"
    """Shape of the learning rate after warm-up."""
    lr_ticks: Annotated[Literal["update", "step"], RESULTS] = "update"
    """Interval at which the learning rate changes (a tick). update: each optimizer step; step: each PPO step that
    trains the role, so that all optimizer steps of a PPO step have the same learning rate. Warm-up and decay then end
    with a PPO step.

    Default of: transformers, trlX, OpenRLHF (update); verl (step)
    Figures: policy/lr, value/lr
    """
    lr_warmup_updates: Annotated[int, RESULTS, NotNegative] = 0
    """Number of optimizer steps of linear warm-up. The first learning rate is above 0, unless `lr_warmup_init_frac`
    is 0.

    Formula: lr (t + 1) / w in tick t = 0 ... w - 1 of a warm-up of w ticks
    Source: Goyal et al. 2017 (arXiv:1706.02677), 2.2
    Default of: verl, TRL, trlX (0); NeMo-RL uses 10 ticks, OpenRLHF a fraction of 0.03
    Figures: policy/lr, value/lr
    """
    lr_warmup_frac: Annotated[float | None, RESULTS, Fraction] = None
    """Length of the warm-up as a fraction of the role's planned optimizer steps, rounded to a tick (verl's
    `lr_warmup_steps_ratio`, transformers' `warmup_ratio`); absent: `lr_warmup_updates`."""
    lr_warmup_init_frac: Annotated[float | None, RESULTS, Fraction] = None
    """Learning rate of the first tick, as a fraction of lr. The learning rate rises from this value and reaches lr in
    the tick after the warm-up. Absent: the formula of `lr_warmup_updates`. With 0, the first tick changes no weights.

    Formula: lr (init + (1 - init) t / w) in tick t = 0 ... w - 1 of a warm-up of w ticks
    Source: Megatron-Core's `lr_warmup_init`, which is a learning rate instead of a fraction
    Default of: no system; verl and transformers begin at 0, NeMo-RL at a tenth of lr (critic: a twentieth)
    """
    lr_decay_updates: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Optimizer step at which linear and cosine schedules reach their minimum; absent: the last planned optimizer
    step."""
    lr_min_frac: Annotated[float, RESULTS, Fraction] = 0.0
    """Minimum of linear and cosine schedules, as a fraction of lr."""
    on: Annotated[OptimizerPlace, SPEED] = "device"
    """Place of main weights and moments, and of the optimizer step. device: where the model is; cpu: in pinned host
    memory. Each optimizer step then moves all gradients to the host and all weights back.

    Default of: all systems (device); NeMo-RL and verl have `optimizer_cpu_offload`
    """
