"""Cases of the tests of layouts: models, layouts, what trains and what is recomputed."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

from layout_lab import LAYOUTS, SHARDED
from lora_lab import adapted

from covering import covering
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.trainable import Trainable

DENSE, EXPERTS, LATENTS = "qwen2-deep", "qwen3-moe", "deepseek-v3-low-rank"
FAMILY = ("TP2", "TP2 sequence", "PP2", "TP2 PP2", "CP2 TP2")
WITH_EXPERTS = ("EP2", "TP2 sequence", "TP2, experts split", "TP2 EP2", "TP2 PP2")
COVERED = {
    DENSE: (
        *FAMILY,
        *("DP2", "DP2 sharded", "DP2 PP2 sharded", "PP2 uneven"),
        *("PP2 interleaved", "TP2 PP2 interleaved", "DP2 PP2 interleaved sharded"),
        *("CP2", "CP3", "CP2 PP2", "CP2 PP2 interleaved", "CP2 DP2 sharded"),
    ),
    EXPERTS: (
        *WITH_EXPERTS,
        *("EP2 sharded", "EP4", "EP2 DP2", "EP2 DP2 sharded", "DP2", "CP2", "CP2 EP2", "CP2 DP2 EP4"),
        *("CP2 TP2, experts split", "TP2 DP2 EP2", "TP2 DP2 EP2, experts split", "PP2", "PP2 EP2 sharded"),
    ),
    LATENTS: (*WITH_EXPERTS, "PP2", "CP2 TP2", "EP2 sharded"),
    "llama": FAMILY,
    "qwen3": FAMILY,
    "gemma2": (*FAMILY, "TP2 PP2 interleaved"),
    "gemma3": (*FAMILY, "TP2 PP2 interleaved"),
    "mistral": ("TP2 PP2", "CP2 TP2"),
    "qwen2-moe": (*WITH_EXPERTS, "PP2 EP2", "CP2 EP2"),
    # Only the second of four layers has experts: the last rank has none, or each rank has two stages of one layer.
    "qwen3-moe-mixed": ("PP2 EP2", "PP2 EP2 interleaved"),
    # The model with latent queries has everything that this one has, except one product.
    "deepseek-v3": ("TP2 sequence",),
}
"""Kind -> layouts. One family of each kind has all layouts, the others have the splits that their own modules could
get wrong."""
CRITICS = (
    *((kind, layout) for kind in (DENSE, EXPERTS) for layout in COVERED[kind]),
    *((kind, "TP2 PP2") for kind in ("llama", "qwen3", "gemma2", "gemma3", "deepseek-v3")),
    *(("qwen2-moe", "TP2 EP2"), ("deepseek-v3", "EP2")),
)
CASES = [
    *((kind, "actor", layout) for kind, layouts in COVERED.items() for layout in layouts),
    *((kind, "critic", layout) for kind, layout in CRITICS),
]
NEVER = "e_score_correction_bias"
"""End of the name of a tensor that no training changes."""
NUM_NEVER = {"deepseek-v3": 2, LATENTS: 2}


@dataclass(frozen=True)
class Part:
    """Parameters that train: settings, and whether a Hugging Face tensor is one of them in a model with `last` as the
    number of its last layer."""

    trainable: Trainable
    has: Callable[[str, int], bool] = lambda name, _: NEVER not in name


def in_top(name: str, last: int) -> bool:
    return name.startswith((f"model.layers.{last}.", "model.norm.", "lm_head.", "score.")) and NEVER not in name


ALL = Part(Trainable())
TOP = Part(Trainable(top_layers=1), in_top)


def frozen(*patterns: str, has: Callable[[str, int], bool]) -> Part:
    return Part(Trainable(None, patterns), has)


ROUTERS = "decoder.layers.*.mlp.router.weight"
LAST_MLP = frozen(
    *("embedding.*", "decoder.layers.[0-2].*", "*attention*", "*norm*"),
    has=lambda name, last: in_top(name, last) and ".mlp." in name,
)
PATTERNS = {
    "weights of a product whose bias trains": (
        (DENSE, "actor", "TP2"),
        frozen(
            "*.linear_qkv.weight",
            has=lambda name, _: not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")),
        ),
    ),
    "a layer between others": (
        (DENSE, "actor", "PP2 interleaved"),
        frozen("decoder.layers.1.*", has=lambda name, _: not name.startswith("model.layers.1.")),
    ),
    "a tied embedding": (
        ("gemma2", "actor", "PP2"),
        frozen("embedding.*", has=lambda name, _: not name.startswith("model.embed_tokens.")),
    ),
    "all but the last norm": (
        (DENSE, "actor", "PP2"),
        frozen("embedding.*", "decoder.layers.*", has=lambda name, _: name == "model.norm.weight"),
    ),
    "routers": (
        (EXPERTS, "actor", "PP2 EP2"),
        frozen(ROUTERS, has=lambda name, _: not name.endswith(".mlp.gate.weight")),
    ),
    "routers with groups": (
        (LATENTS, "actor", "EP2"),
        frozen(ROUTERS, has=lambda name, _: not name.endswith((".mlp.gate.weight", NEVER))),
    ),
    "all but the experts": (
        (EXPERTS, "actor", "EP2"),
        frozen(
            *("embedding.*", "output_layer.*", "*norm*", "*attention*", "*router*"),
            has=lambda name, _: ".experts." in name,
        ),
    ),
}
ADAPTERS = {
    DENSE: Part(adapted()),
    "gemma2": Part(adapted("k_proj", "up_proj", "down_proj")),
    "gemma3": Part(adapted("q_proj", "o_proj", "gate_proj")),
    EXPERTS: Part(adapted()),
    LATENTS: Part(adapted()),
    "qwen2-moe": Part(adapted("q_proj", "up_proj", "down_proj")),
}
WITH_ADAPTERS = [case for case in CASES if case[0] in ADAPTERS]


RECOMPUTED = (
    *((DENSE, layout, "all") for layout in ("TP2 sequence", "PP2", "CP2")),
    (EXPERTS, "EP2", "all"),  # experts exchange tokens again
    *((DENSE, layout, "top") for layout in ("alone", "PP2", "TP2 sequence")),
    (DENSE, "alone", "last MLP"),
    *((DENSE, layout, "adapters") for layout in ("alone", "TP2 sequence", "PP2", "CP2")),
)
"""Megatron-Core recomputes a part of the model only if the input of the part needs a gradient: a layer above a frozen
trunk is a case of its own."""
SHIPPED = (
    (DENSE, "actor", "alone", "all", "full"),
    (DENSE, "actor", "alone", "top", "full"),
    (DENSE, "actor", "alone", "adapters", "full"),
    (DENSE, "critic", "alone", "adapters", "selective"),
    (DENSE, "critic", "DP2 sharded", "all", "full"),
    (DENSE, "actor", "DP2 sharded", "top", "none"),
    ("gemma2", "actor", "TP2", "all", "full"),
    (DENSE, "actor", "DP2 TP2 sequence sharded", "all", "full"),
    (DENSE, "critic", "DP2 TP2 sharded", "all", "full"),
    ("qwen3", "actor", "TP2 PP2 sharded", "all", "selective"),
    (DENSE, "actor", "CP2 TP2 sharded", "all", "none"),
    ("llama", "actor", "CP2 TP2 without sequence sharded", "all", "full"),
)
"""Combinations of the recipes in `recipes/`, on at most four ranks."""
FAMILIES = (
    ("gemma2", "actor", "TP2 PP2", "all", "none"),
    ("gemma3", "actor", "CP2 TP2", "all", "none"),
    ("qwen2-moe", "actor", "TP2 EP2", "all", "none"),
)
RECOMPUTE = ("none", "selective", "full")
STEPS = list(
    dict.fromkeys(
        [
            *SHIPPED,
            *((*case, "all", "none") for case in CASES),
            *((*case, "top", how) for case, how in zip(CASES, cycle(RECOMPUTE), strict=False)),
            *((*case, "adapters", how) for case, how in zip(WITH_ADAPTERS, cycle(RECOMPUTE), strict=False)),
            *((kind, "actor", *of, how) for kind, *of in RECOMPUTED for how in RECOMPUTE[1:]),
        ]
    )
)


def features(case: tuple[str, ...]) -> dict[str, object]:
    """Return the features of a case, of which `make test` runs every pair, and CI also what recipes combine."""
    kind, role, layout, trains, recompute = case
    table = LAYOUTS[layout.removesuffix(SHARDED)].model_copy(update={"distributed_optimizer": SHARDED in layout})
    model = "latents" if "deepseek" in kind else "experts" if "moe" in kind else "dense"
    trains = "top" if trains == "last MLP" else trains
    return {**splits(table), "model": model, "role": role, "trains": trains, "recompute": recompute}


def splits(layout: ParallelTable) -> dict[str, object]:
    return {
        "tensor": (layout.tensor > 1, layout.sequence),
        "pipeline": (layout.pipeline > 1, layout.stages_per_rank > 1),
        "context": layout.context > 1,
        "data": layout.data > 1,
        "experts": layout.expert_ranks > 1,
        "sharded": layout.distributed_optimizer,
    }


IN_CI = covering(STEPS, features, (*SHIPPED, *FAMILIES))
QUICK = covering(IN_CI, features)
ALONE = {"all": ALL, "top": TOP, "last MLP": LAST_MLP}
