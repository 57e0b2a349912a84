"""The recipe table of a trained role: optimizer, trained part, microbatches and parallel layout."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from ppoctl.algorithms.optimizer_table import OptimizerTable
from ppoctl.core.recipe_table import RESULTS, SPEED, Array, AtLeastOne, NotNegative, ParallelTable, Table
from ppoctl.models.trainable_tables import BY_ON, PatternsOrOne, Train, ValueHeadTable

Recompute = Literal["none", "selective", "full"]
Kernels = Literal["plain", "fused"]
RouterReplay = Literal["off", "generator", "trainer"]


class BySequences(Table):
    """Microbatches of a fixed number of sequences."""

    microbatch_seqs: Annotated[int, SPEED, AtLeastOne]
    """Sequences in one forward and backward pass (Megatron-Core's `micro_batch_size`)."""
    forward_microbatch_seqs: Annotated[int | None, SPEED, AtLeastOne] = None
    """Sequences in one forward pass without gradient (log-probs of actor and reference, values); absent:
    `microbatch_seqs`."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Number of tokens whose logits are in memory at the same time."""


class ByTokens(Table):
    """Microbatches by a token budget: each contains as many complete sequences as fit."""

    max_tokens_per_microbatch: Annotated[int, SPEED, AtLeastOne]
    """Maximum number of packed tokens in one forward and backward pass; if a sequence is longer, the run does not
    start."""
    forward_max_tokens_per_microbatch: Annotated[int | None, SPEED, AtLeastOne] = None
    """Maximum number of packed tokens in one forward pass without gradient (log-probs of actor and reference,
    values); absent: `max_tokens_per_microbatch`."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Number of tokens whose logits are in memory at the same time."""


def _batching_kind(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", None)
    return None if keys is None else "sequences" if _TOKEN_KEYS.isdisjoint(keys) else "tokens"


_TOKEN_KEYS = frozenset(ByTokens.model_fields) - frozenset(BySequences.model_fields)


Batching = Annotated[
    Annotated[BySequences, Tag("sequences")] | Annotated[ByTokens, Tag("tokens")], Discriminator(_batching_kind)
]


class TrainedTable(Table):
    """One trained role, such as the actor or the critic."""

    optimizer: OptimizerTable
    """Optimizer of the role and its learning-rate schedule."""
    train: Train = None
    """What trains: the last layers (`top_layers`) or adapters (`lora`); absent or "all": every layer. Frozen weights
    have no gradient, no main weights and no moments, and a reference shares them with the actor."""
    freeze: Annotated[tuple[str, ...], RESULTS, Array, PatternsOrOne] = ()
    """Glob patterns over Megatron's parameter names, such as `decoder.layers.*.mlp.router.weight`. Parameters with a
    matching name are frozen in addition to those that `train` leaves out. A pattern must match at least one name.
    Default of: NeMo-RL freezes routers (`freeze_moe_router`); all other systems freeze nothing.
    """
    batching: Batching = ByTokens(max_tokens_per_microbatch=16384)
    """Split of the role's sequences into microbatches that fit into memory. The split never changes a gradient."""
    recompute: Annotated[Recompute, SPEED] = "none"
    """Activations that are not kept in memory, but recomputed in the backward pass (Megatron-Core's
    `recompute_granularity`). selective: the activations inside the MLP; full: all activations except the input of
    each layer (one third more computation)."""
    kernels: Annotated[Kernels, SPEED] = "plain"
    """Kernels between the matrix products. plain: one for each operation; fused: Megatron-Core's for the activation
    of gated MLPs, in models with SiLU (`bias_activation_fusion`), and on a GPU compiled arithmetic of log-probs and
    entropies, whose weight gradient is added in float32 inside the product. The function is the same up to rounding,
    and an MLP keeps 3/5 of the memory. A GPU compiles at the first update; a CPU never does.
    """
    parallel: ParallelTable | None = None
    """Parallel layout of the role; absent: one process for the actor, and the actor's layout for the critic."""


class ActorTable(TrainedTable):
    """The actor."""

    router_replay: Annotated[RouterReplay, RESULTS] = "off"
    """Experts of a mixture in the actor's update. off: each pass chooses again, so a token may train other experts
    than those that computed its old log-prob; trainer: those that the forward pass of the old log-probs chose (R2);
    generator: those that vLLM chose, in the old log-probs too (R3). The weights of the experts are always computed
    again, and have their gradient.
    Default of: no system replays by default; the key exists in NeMo-RL (`policy.router_replay`) and verl
    (`actor.router_replay`).
    """
    router_aux_loss_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of a loss that balances the experts of a mixture in each sequence (Megatron-Core's
    `seq_aux_loss`), summed over layers; 0: there is no such loss. T is the number of input tokens of a sequence, with
    its prompt. tokens_i are those that use expert i, also if a bias or `router_replay` chose it. Scores s_ti of a
    token have the sum 1: a sigmoid router divides them by their sum. `policy/loss` does not contain this loss.

    Formula: loss = coef mean_sequences sum_i f_i P_i; f_i = experts / (k T) tokens_i; P_i = 1/T sum_t s_ti
    Source: DeepSeek-AI 2024 (arXiv:2412.19437), eq. 17 to 20
    Default of: NeMo-RL, OpenRLHF, and verl except for DeepSeek-V3 (the model's `aux_loss_alpha`, or 0.001)
    Figures: policy/router_aux_loss, policy/expert_load_max
    """
    router_bias_rate: Annotated[float, RESULTS, NotNegative] = 0.0
    """Change of the bias of each expert of a sigmoid router after an optimizer step (Megatron-Core's
    `moe_router_bias_update_rate`): up if the expert has fewer tokens of the minibatch than the mean of its layer,
    down if it has more; 0: the bias stays. All parameters must train.

    Formula: bias_i = bias_i + rate sign(mean_j tokens_j - tokens_i)
    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1; DeepSeek-V3 was trained with 0.001
    Default of: NeMo-RL; verl has 0.001
    Figures: policy/expert_load_max
    """


CriticTable = Annotated[Annotated[TrainedTable, Tag("own model")] | Annotated[ValueHeadTable, Tag("actor")], BY_ON]
