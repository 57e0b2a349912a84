"""Weights of a model with adapters: engines and exports get merged weights, the reference is the model without
adapters, and a saved state contains only what trains."""

import re
from collections.abc import Sequence
from dataclasses import replace

import lora_lab
import megatron_lab as lab
import pytest
import test_shared_reference as references
import torch
from layout_lab import STEP, settings_of, weights_of
from layout_lab import started as started_under
from lora_lab import ALL, adapted, started, started_actor

from ppoctl.core.errors import StorageError
from ppoctl.models.convert.adapters import adapters, merged
from ppoctl.models.convert.frozen_base import read_frozen_base
from ppoctl.models.convert.torch_dist import read_metadata
from ppoctl.models.trainable import Trainable
from tolerance import EXACT, FLOAT32

pytestmark = pytest.mark.engines

SPLIT = ("TP2 sequence", "PP2", "PP2 interleaved", "CP2", "TP2 PP2")
PARTS = ("changing", "constant")
AGAIN = {
    # Two of four layers have adapters, on their queries: engines load an attention block only as a whole.
    "attention": (
        *("qwen2-deep", adapted("q_proj", freeze=("decoder.layers.0.*", "decoder.layers.2.*")), "PP2"),
        *(r"model\.layers\.[13]\.self_attn", 14),
    ),
    # The first layer has an MLP, the others have 8 routed experts, a router and shared experts.
    "shared experts": (
        *("deepseek-v3-low-rank", adapted("up_proj"), "PP2"),
        *(r"model\.layers\.(0\.mlp|[12]\.mlp\.shared_experts)", 9),
    ),
    # Each of three layers has 4 of these experts with three weights; without adapters, all other weights train.
    "all but routed experts": (
        *("qwen2-moe", Trainable(freeze=("*.mlp.experts.*",)), "PP2"),
        *(r"(?!.*\.experts\.)", 3 + 3 * (2 + 7 + 5)),
    ),
}
SENT = [
    *(("qwen2-deep", ALL, name) for name in ("alone", "DP2 sharded", *SPLIT)),
    ("gemma2", adapted("v_proj", "gate_proj"), "TP2 sequence"),
    ("qwen2-moe", ALL, "TP2 EP2"),
    ("deepseek-v3-low-rank", ALL, "TP2 sequence"),
]


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize(
    ("kind", "trainable", "layout", "dtype"),
    [
        # The recipes with adapters train in bfloat16, on one GPU.
        pytest.param(
            *case,
            getattr(torch, dtype),
            id=f"{case[0]} {case[2]} {dtype}",
            marks=[pytest.mark.pinned] if (place, dtype) == (0, "bfloat16") else [],
        )
        for dtype in ("float32", "bfloat16")
        for place, case in enumerate(SENT)
    ],
)
def test_sent_and_exported_weights_are_merged_from_the_whole_matrices(
    pool, model, tmp_path, kind, trainable, layout, dtype
):
    actor = started_under(pool, settings_of(model, kind, layout, trainable=trainable, dtype=dtype))
    rollouts = lab.make_rollouts()
    actor.update(rollouts, [lab.minibatch(rollouts, step=STEP)] * 2, lab.policy_objective(rollouts))
    sent = weights_of(pool)
    matrices = lora_lab.matrices_of(actor, lora_lab.saved(actor, tmp_path / "state"))
    base = {name: each.to(sent[name].dtype) for name, each in lab.weights_in(model(kind)).items()}
    expected = dict(base)
    for each in adapters(actor.source[1], trainable):
        a, b = matrices[each.a.name], matrices[each.b.name]
        assert a.dtype == b.dtype == sent[each.base.name].dtype == dtype
        expected[each.base.name] = merged(base[each.base.name], a, b, trainable.lora.scale)
        assert not torch.equal(expected[each.base.name], base[each.base.name])
    lab.check_all(EXACT, sent, expected)
    (tmp_path / "export").mkdir()
    actor.save_weights(tmp_path / "export")
    lab.check_all(EXACT, lab.weights_in(tmp_path / "export"), expected)


@pytest.mark.parametrize("case", AGAIN)
def test_only_blocks_that_change_are_sent_again(pool, model, case):
    kind, trainable, layout, again_pattern, number = AGAIN[case]
    started_under(pool, settings_of(model, kind, layout, trainable=trainable))
    found = {part: [spec.name for rank in pool.call("weight_specs", (part,)) for spec in rank] for part in PARTS}
    every = lab.weights_in(model(kind)).keys()
    again = {name for name in every if re.match(again_pattern, name)}
    assert len(again) == number
    assert set(found["changing"]) == again
    assert sorted(found["constant"]) == sorted(every - again)


REFERENCES = {
    "qwen2-six": adapted("q_proj", "up_proj", "down_proj"),
    "gemma2": ALL,
    "gemma3": ALL,
    "qwen2-moe": ALL,
    "deepseek-v3-low-rank": ALL,
    "qwen2-deep": adapted(freeze=("decoder.layers.[0-1].*",)),
}


@pytest.mark.sampled(1, 2)
@pytest.mark.parametrize("kind", REFERENCES)
def test_reference_is_the_base_model_and_full_kl_is_that_of_two_complete_models(model, tmp_path, kind):
    folder = lab.with_ends(model(kind), tmp_path / "base", (5, 33))
    actor, rollouts = started_actor(folder, REFERENCES[kind]), lab.make_rollouts()
    level = FLOAT32 if kind.startswith("deepseek") else EXACT
    references.train(actor)
    (tmp_path / "trained").mkdir()
    actor.save_weights(tmp_path / "trained")
    initial = started_actor(folder, Trainable())
    complete = started_actor(tmp_path / "trained", Trainable(), reference=str(folder))
    alone = actor.logprobs(rollouts, references.FILTERED)
    frozen = initial.logprobs(rollouts, references.PLAIN).primary
    both = actor.logprobs(rollouts, replace(references.FILTERED, reference=True))
    level.check(both.reference, frozen)
    level.check(actor.reference_logprobs(rollouts, references.PLAIN), frozen)
    level.check(both.primary, alone.primary)
    assert float((alone.primary - frozen)[rollouts.mask].abs().max()) > 0.01
    FLOAT32.check(alone.primary, complete.logprobs(rollouts, references.FILTERED).primary)
    full = replace(references.FILTERED, full_kl=True)
    expected = complete.logprobs(rollouts, full).full_kl
    assert expected is not None
    FLOAT32.check(actor.logprobs(rollouts, full).full_kl, expected)
    objective = replace(lab.policy_objective(rollouts), scored=full)
    still = lab.minibatch(rollouts, step=replace(lab.STEP, lr=0.0))
    FLOAT32.check(actor.update(rollouts, [still], objective)[0].outputs.full_kl, expected)
    level.check(actor.logprobs(rollouts, references.FILTERED).primary, alone.primary)
    assert references.own_bytes(lab.rank_of(actor)) == 0


@pytest.mark.parametrize("how", [{"recompute": "full"}, {"dtype": torch.bfloat16, "recompute": "selective"}])
def test_recomputed_or_rounded_reference_is_the_base_model(model, how):
    actor, rollouts = started_actor(model("qwen2-deep"), ALL, **how), lab.make_rollouts()
    references.train(actor)
    found = actor.logprobs(rollouts, references.BOTH)
    expected = started_actor(model("qwen2-deep"), Trainable(), **how).logprobs(rollouts, references.PLAIN)
    EXACT.check(found.reference, expected.primary)
    lab.rank_of(actor).offload()
    EXACT.check(actor.reference_logprobs(rollouts, references.PLAIN), expected.primary)
    EXACT.check(actor.logprobs(rollouts, references.BOTH).primary, found.primary)


def test_reference_with_a_path_of_its_own_has_weights_of_its_own(model, tmp_path):
    other = lab.with_scaled_weights(model("qwen2-deep"), tmp_path / "other")
    actor = started_actor(model("qwen2-deep"), ALL, reference=str(other))
    references.train(actor)
    found = actor.logprobs(lab.make_rollouts(), references.BOTH)
    expected = started_actor(other, Trainable()).logprobs(lab.make_rollouts(), references.PLAIN)
    EXACT.check(found.reference, expected.primary)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", SPLIT)
def test_reference_does_not_depend_on_the_layout(pool, model, layout):
    references.check_outputs(pool, settings_of(model, "qwen2-deep", layout, trainable=ALL))


def test_state_contains_matrices_and_value_head_alone_with_a_digest_of_all_other_weights(pool, model, tmp_path):
    digests: dict[str, Sequence[str]] = {}
    for role, head in (("actor", set()), ("critic", {"output_layer.weight"})):
        digests[role] = []
        for name in ("alone", "TP2 PP2"):
            trained = started_under(pool, settings_of(model, "qwen2-deep", name, role, trainable=ALL))
            folder = tmp_path / f"{role} {name}"
            lora_lab.saved(trained, folder)
            keys = {key for key in read_metadata(folder).state_dict_metadata if not key.startswith("optimizer")}
            assert keys == {each.parameter for each in lora_lab.placements_of(trained)} | head
            base = read_frozen_base(folder)
            assert base is not None
            assert base.model == str(model("qwen2-deep"))
            digests[role] = [*digests[role], base.digest]
        assert digests[role][0] == digests[role][1]
    assert digests["actor"][0] == digests["critic"][0]  # the token head is tied, so both have the same frozen tensors


OTHERS = {
    "all": (Trainable(), "`train = all`"),
    "rank": (adapted(rank=4), "rank = 4"),
    "alpha": (adapted(alpha=4.0), "alpha = 4,"),
    "targets": (adapted("q_proj", "v_proj"), r"targets = \['q_proj', 'v_proj'\]"),
    "freeze": (adapted(freeze=("decoder.layers.0.*",)), r"freeze = \['decoder"),
}


def test_state_of_other_adapters_or_another_base_is_refused(model, tmp_path):
    actor = started(model("qwen2"), ALL)
    lora_lab.saved(actor, tmp_path / "state")
    for other, named in OTHERS.values():
        made = replace(actor.settings, trainable=other)
        with pytest.raises(StorageError, match=rf"targets = \"all-linear\".* now has .*{named}") as refused:
            lab.unstarted(made).load(tmp_path / "state")
        assert "`train` and `freeze`" in str(refused.value.hint)
    scaled = lab.with_scaled_weights(model("qwen2"), tmp_path / "scaled")
    made = replace(actor.settings, model=str(scaled))
    with pytest.raises(StorageError, match=r"frozen weights of the actor in .*scaled` are not those of the state"):
        lab.unstarted(made).load(tmp_path / "state")
