"""The layout changes speed and memory, but not results: steps, outputs, weights and states of models with and without
experts and with latent attention, under layouts of real gloo processes, compared with one process on equal rollouts.

All parameters train, or those of the last layers or of a pattern, or adapters. A part that trains has the gradient of
full training, and everything else keeps its bits.

Routing is a discrete choice: if the last chosen and the first rejected expert nearly tie, rounding decides, and
layouts cannot be compared. `test_expert_router.py` shows that these weights and tokens have no near ties.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lora_lab
import megatron_lab as lab
import pytest
import torch
from layout_lab import (
    CHANGE_GAP,
    GRADIENT_GAP,
    STEP,
    TEMPERATURE,
    Model,
    Steps,
    assert_close,
    gap,
    resumes_under_layout,
    settings_of,
    started_actor,
    steps_under,
    trainer,
)
from lora_lab import ATTENTION, LATENT, adapted
from rank_pool import RankPool
from torch import Tensor

from ppoctl.convert.frozen_base import read_frozen_base
from ppoctl.convert.tensors import weight_names
from ppoctl.convert.torch_dist import read_metadata
from ppoctl.engines.megatron.settings import TrainerSettings
from ppoctl.model.trainable import Trainable
from ppoctl.ports import OutputRequest
from tolerance import EXACT

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
    *((kind, "TP2 PP2") for kind in ("llama", "qwen3", "gemma2", "deepseek-v3")),
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
    EXPERTS: Part(adapted(*ATTENTION)),
    LATENTS: Part(adapted(*LATENT)),
}
WITH_ADAPTERS = [case for case in CASES if case[0] in ADAPTERS]


def named(cases: list[tuple[str, ...]]) -> list[str]:
    return [" ".join(case) for case in cases]


def check_steps(made: TrainerSettings, part: Part, kind: str, found: Steps, expected: Steps) -> None:
    """Compare steps under a layout with those of one process. Under a distributed optimizer no rank has the whole
    gradient, so only its norm and its effect are compared."""
    is_whole = not made.parallel.distributed_optimizer
    if part.trainable.lora is not None:
        check_adapters(found, expected)
    elif part is ALL:
        assert max(float(tensor.abs().max()) for tensor in expected["change"].values()) > 1e-3
        assert_close(found, expected, {"reported": CHANGE_GAP, "change": CHANGE_GAP})
        if is_whole:
            assert_close(found, expected, {"gradient": GRADIENT_GAP})
        untrained = [change for name, change in found["change"].items() if name.endswith(NEVER)]
        assert len(untrained) == NUM_NEVER.get(kind, 0)
        assert not any(change.any() for change in untrained)
    else:
        names = {name for name in expected["change"] if part.has(name, lab.num_layers(kind) - 1)}
        check_part(found, expected, names, is_whole=is_whole)


def unclipped(steps: Steps, names: set[str]) -> dict[str, Tensor]:
    """Return the first gradient of these tensors as it was before clipping."""
    factor = max(1.0, float(steps["reported"]["0 grad_norm"]) / STEP.grad_clip)
    return {name: factor * gradient for name, gradient in steps["gradient"].items() if name in names}


def check_part(found: Steps, whole: Steps, names: set[str], *, is_whole: bool) -> None:
    """Compare three steps of a part with three steps of all parameters: the first gradient, and what has moved."""
    assert 0 < len(names) < len(whole["change"])
    assert {name for name, change in found["change"].items() if change.any()} == names
    part, expected = (unclipped(steps, names) for steps in (found, whole))
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    assert norm > 0.01
    norm_gap = abs(float(found["reported"]["0 grad_norm"]) / norm - 1)
    assert norm_gap < GRADIENT_GAP, f"gradient: {norm_gap}"
    torch.testing.assert_close(found["reported"]["0 primary"], whole["reported"]["0 primary"], atol=1e-4, rtol=1e-4)
    assert not is_whole or gap(part, expected) < GRADIENT_GAP


def check_adapters(found: Steps, expected: Steps) -> None:
    lab.check_all(EXACT, found["initial"], expected["initial"])
    assert min(float(change.abs().max()) for change in expected["change"].values()) > 1e-3
    assert min(float(gradient.abs().max()) for gradient in expected["gradient"].values()) > 0
    # The gradient is that of the third step: AdamW has amplified differences of gradients near 0 in two steps.
    assert_close(found, expected, dict.fromkeys(("gradient", "change", "reported"), CHANGE_GAP))


@pytest.fixture
def compare(pool: RankPool, model: Model, alone: Callable[..., Steps], tmp_path: Path) -> Callable[..., None]:
    def compared(case: tuple[str, str, str], part: Part, recompute: str = "none", lost: str | None = None) -> None:
        kind, role, layout = case
        made = settings_of(model, kind, layout, role, trainable=part.trainable, recompute=recompute)
        found = steps_under(pool, made, tmp_path, lost)
        oracle = part.trainable if part.trainable.lora is not None else Trainable()
        check_steps(made, part, kind, found, alone(kind, role, oracle))

    return compared


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=named(CASES))
def test_gradients_and_steps_do_not_depend_on_layout(compare, case):
    compare(case, ALL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=named(CASES))
def test_top_layer_alone_moves_with_the_gradient_of_full_training(compare, case):
    compare(case, TOP)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_parameters_of_a_pattern_stay_and_others_have_the_gradient_of_full_training(compare, pattern):
    compare(*PATTERNS[pattern])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", WITH_ADAPTERS, ids=named(WITH_ADAPTERS))
def test_adapters_have_the_steps_of_one_process(compare, case):
    compare(case, ADAPTERS[case[0]])


RECOMPUTED = {
    **{f"all {layout}": ((DENSE, "actor", layout), ALL) for layout in ("TP2 sequence", "PP2", "CP2")},
    "experts exchange tokens again": ((EXPERTS, "actor", "EP2"), ALL),
    **{f"top {layout}": ((DENSE, "actor", layout), TOP) for layout in ("alone", "PP2", "TP2 sequence")},
    "last MLP": ((DENSE, "actor", "alone"), LAST_MLP),
    **{
        f"adapters {layout}": ((DENSE, "actor", layout), ADAPTERS[DENSE])
        for layout in ("alone", "TP2 sequence", "PP2", "CP2")
    },
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("case", RECOMPUTED)
def test_recomputed_layers_have_the_steps_of_one_process(compare, case, recompute):
    """Megatron-Core recomputes a part of the model only if the input of the part needs a gradient: a layer above a
    frozen trunk is a case of its own."""
    compare(*RECOMPUTED[case], recompute)


DEFECTS = {
    "all of a data rank": ((DENSE, "actor", "DP2"), ALL, ""),
    "experts of an expert rank": ((EXPERTS, "actor", "EP2"), ALL, "local_experts"),
    "key that all heads share": ((LATENTS, "actor", "TP2 sequence"), ALL, "linear_kv_down_proj"),
    "MLP of the layer that trains": ((DENSE, "actor", "TP2"), TOP, ".mlp."),
    "adapters of a product": ((DENSE, "actor", "TP2"), ADAPTERS[DENSE], "gate_proj.lora_B"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_lost_gradient_of_one_rank_fails_the_comparison(compare, defect):
    """Shows that the comparisons above can fail."""
    case, part, lost = DEFECTS[defect]
    with pytest.raises(AssertionError, match=r"^(gradient|reported|change): \d"):
        compare(case, part, lost=lost)


OUTPUTS = [
    *((DENSE, layout) for layout in ("TP2", "TP2 PP2", "PP2 interleaved")),
    *((EXPERTS, layout) for layout in (*WITH_EXPERTS, "EP2 DP2", "TP2 DP2 EP2, experts split", "PP2 EP2")),
    *((LATENTS, layout) for layout in ("TP2 sequence", "PP2", "TP2 PP2", "EP2", "TP2 EP2")),
    *((kind, layout) for kind in ("llama", "qwen3", "gemma2") for layout in ("TP2", "PP2", "TP2 PP2")),
    ("mistral", "TP2 PP2"),
    *(("qwen2-moe", layout) for layout in ("EP2", "TP2 EP2", "TP2 PP2")),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "layout"), OUTPUTS, ids=named(OUTPUTS))
def test_logprobs_match_transformers_and_sent_and_exported_weights_are_exact(pool, model, tmp_path, kind, layout):
    """Experts are sent bucket by bucket, by the ranks that hold one copy. Padding of the vocabulary is neither
    sent nor exported."""
    actor, rollouts = started_actor(pool, settings_of(model, kind, layout)), lab.make_rollouts()
    expected, entropy = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, TEMPERATURE)
    found = lab.scores(actor, rollouts, TEMPERATURE)
    reference = actor.reference_logprobs(rollouts, OutputRequest(temperature=TEMPERATURE))
    for one, other in zip((*found, reference), (expected, entropy, expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    actor.save_weights(tmp_path)
    source, sent = lab.weights_in(model(kind)), list(pool.tensors())
    lab.assert_same(lab.weights_in(tmp_path), source)
    lab.assert_same(dict(sent), source)
    names, expected_names = [name for name, _ in sent], list(weight_names(actor.source[1]))
    if "interleaved" in layout:
        names, expected_names = sorted(names), sorted(expected_names)
    assert names == expected_names


RESUMED = {
    "all": [
        *((DENSE, "TP2 sequence", "PP2"), (DENSE, "TP2", "alone"), (DENSE, "PP2 uneven", "TP2 PP2")),
        *((DENSE, "DP2 sharded", "DP2 sharded"), (DENSE, "DP2 sharded", "alone sharded")),
        *((DENSE, "DP2 PP2 sharded", "DP2 sharded"), (DENSE, "alone", "TP2 PP2"), (DENSE, "PP2 interleaved", "TP2")),
        *((DENSE, "PP2", "TP2 PP2 interleaved"), (DENSE, "DP2 PP2 interleaved sharded", "DP2 sharded")),
        *((DENSE, "CP2 TP2", "PP2"), (DENSE, "TP2", "CP2"), (DENSE, "CP2 DP2 sharded", "DP2 sharded")),
        *((EXPERTS, "EP2", "alone"), (EXPERTS, "EP2", "TP2 sequence"), (EXPERTS, "EP2", "PP2")),
        *((EXPERTS, "alone", "TP2 DP2 EP2, experts split"), (EXPERTS, "EP2 sharded", "alone sharded")),
        *((EXPERTS, "EP2 DP2 sharded", "PP2 EP2 sharded"), (LATENTS, "EP2", "alone"), (LATENTS, "alone", "TP2 PP2")),
        *(("gemma2", "TP2 PP2", "alone"), ("gemma2", "alone", "TP2")),
        *(("qwen2-moe", "TP2 EP2", "PP2 EP2"), ("qwen2-moe", "EP2", "alone")),
    ],
    "top": [
        *((DENSE, "PP2", "alone"), (DENSE, "TP2", "PP2 interleaved"), (DENSE, "DP2 PP2 sharded", "DP2 sharded")),
        *((DENSE, "DP2 sharded", "DP2 PP2 sharded"), (DENSE, "DP2 PP2 interleaved sharded", "alone sharded")),
        *((EXPERTS, "PP2 EP2 sharded", "EP2 sharded"), (EXPERTS, "PP2", "EP2")),
    ],
    "adapters": [
        *((DENSE, "PP2", "alone"), (DENSE, "TP2 sequence", "PP2 interleaved"), (DENSE, "TP2 PP2", "CP2")),
        *((DENSE, "DP2 sharded", "DP2 TP2 sharded"), (DENSE, "PP2 interleaved", "TP2")),
        *((LATENTS, "TP2 sequence", "EP2"), (EXPERTS, "EP2", "TP2 sequence")),
    ],
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# In bfloat16, the rows A x of adapters are rounded before and after their sum over tensor ranks, and a token may
# reach another expert.
STATES = [
    (trains, *case, dtype)
    for trains, cases in RESUMED.items()
    for case in cases
    for dtype in DTYPES
    if dtype == "float32"
    or case[0] == DENSE
    or (trains, case[0]) in (("all", EXPERTS), ("all", LATENTS), ("top", EXPERTS))
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("trains", "kind", "saved_under", "loaded_under", "dtype"), STATES, ids=named(STATES))
def test_state_loads_under_other_layout(pool, model, tmp_path, trains, kind, saved_under, loaded_under, dtype):
    trainable = {"all": ALL, "top": TOP, "adapters": ADAPTERS.get(kind, ALL)}[trains].trainable
    saved, loaded = (
        settings_of(model, kind, layout, trainable=trainable, dtype=DTYPES[dtype])
        for layout in (saved_under, loaded_under)
    )
    rounds, has_adapters = dtype == "bfloat16", trains == "adapters"
    loss_gap = 0.01 if rounds and has_adapters else None
    change_gap = CHANGE_GAP if not rounds else 0.1 if kind == DENSE and not has_adapters else 0.2
    if rounds and kind == LATENTS:
        # bfloat16 rounds by more than the margin between two experts, so only the loaded weights are compared.
        loss_gap = change_gap = math.inf
    assert resumes_under_layout(pool, saved, loaded, tmp_path, loss_gap) < change_gap
    untrained = {name: tensor for name, tensor in pool.tensors() if name.endswith(NEVER)}
    assert len(untrained) == NUM_NEVER.get(kind, 0)
    source = lab.weights_in(model(kind))
    lab.assert_same(untrained, {name: source[name] for name in untrained})
    keys = read_metadata(tmp_path).state_dict_metadata
    in_layers = [key for key in keys if "decoder.layers." in key]
    if trains == "top":
        assert in_layers
        assert all(f"decoder.layers.{lab.num_layers(kind) - 1}." in key for key in in_layers)
        assert not any("embedding" in key for key in keys)
        base = read_frozen_base(tmp_path)
        assert base is not None
        assert base.model == str(model(kind))
    if trains == "adapters":
        names = {each.parameter for each in lora_lab.placements_of(trainer(pool, saved))}
        assert {key for key in keys if not key.startswith("optimizer")} == names
        assert all(any(key.endswith(name) for name in names) for key in in_layers)
