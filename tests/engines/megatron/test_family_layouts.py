"""Each family under each kind of layout: outputs and gradients equal those of one process, and exported weights equal
the source to the bit.

`test_megatron_layouts` and `test_expert_layouts` try all layouts with one family; this file tries every family with
the splits that its own modules could get wrong.
"""

import megatron_lab as lab
import pytest
import torch
from layout_lab import CHANGE_GAP, assert_agree, resumes_under_layout, settings, three_steps, trainer
from safetensors.torch import load_file

from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.recipe.schema import ParallelTable

DENSE = {
    "TP2": ParallelTable(tensor=2),
    "TP2 sequence": ParallelTable(tensor=2, sequence=True),
    "PP2": ParallelTable(pipeline=2),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True),
    "CP2 TP2": ParallelTable(context=2, tensor=2, sequence=True),
}
INTERLEAVED = {"TP2 PP2 interleaved": ParallelTable(tensor=2, pipeline=2, stages_per_rank=2, sequence=True)}
MIXTURE = {
    "EP2": ParallelTable(data=2, expert=2),
    "TP2, experts whole": ParallelTable(tensor=2, sequence=True),
    "TP2, experts split": ParallelTable(tensor=2, sequence=True, expert_tensor=2),
    "TP2 EP2": ParallelTable(tensor=2, sequence=True, expert=2),
    "PP2 EP2": ParallelTable(pipeline=2, data=2, expert=2, first_stage_layers=1),
    "CP2 EP2": ParallelTable(context=2, expert=2),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2, sequence=True, first_stage_layers=1),
}
CASES = [
    *((kind, "actor", layout) for kind in ("llama", "qwen3") for layout in DENSE.values()),
    *((kind, "critic", DENSE["TP2 PP2"]) for kind in ("llama", "qwen3")),
    *(("gemma2", "actor", layout) for layout in [*DENSE.values(), *INTERLEAVED.values()]),
    ("gemma2", "critic", DENSE["TP2 PP2"]),
    *(("qwen2-moe", "actor", layout) for layout in MIXTURE.values()),
    ("qwen2-moe", "critic", MIXTURE["TP2 EP2"]),
    ("mistral", "actor", DENSE["TP2 PP2"]),
    ("mistral", "actor", DENSE["CP2 TP2"]),
]
NAMES = {id(layout): name for layouts in (DENSE, INTERLEAVED, MIXTURE) for name, layout in layouts.items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "role", "layout"), CASES, ids=[f"{kind} {role} {NAMES[id(layout)]}" for kind, role, layout in CASES]
)
def test_family_gradients_and_steps_do_not_depend_on_layout(pool, model, alone, kind, role, layout):
    found, expected = three_steps(pool, settings(model(kind), role, layout)), alone(kind, role)
    assert_agree(found, expected, whole=True)


EXPORTS = [
    *((kind, DENSE[layout]) for kind in ("llama", "qwen3") for layout in ("TP2", "PP2", "TP2 PP2")),
    ("gemma2", DENSE["TP2"]),
    ("gemma2", DENSE["PP2"]),
    ("gemma2", DENSE["TP2 PP2"]),
    ("mistral", DENSE["TP2 PP2"]),
    *(("qwen3-moe", MIXTURE[layout]) for layout in ("EP2", "PP2 EP2", "TP2 PP2")),
    ("qwen2-moe", MIXTURE["EP2"]),
    ("qwen2-moe", MIXTURE["TP2 EP2"]),
    ("qwen2-moe", MIXTURE["TP2 PP2"]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "layout"), EXPORTS, ids=[f"{kind} {NAMES[id(layout)]}" for kind, layout in EXPORTS])
def test_family_logprobs_match_transformers_and_export_is_exact(pool, model, tmp_path, kind, layout):
    actor = trainer(pool, settings(model(kind), "actor", layout))
    assert isinstance(actor, MegatronActor)
    actor.start()
    rollouts = lab.make_rollouts()
    expected, entropy = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, 0.8)
    found = lab.scores(actor, rollouts, 0.8)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], entropy, atol=1e-4, rtol=0)
    actor.save_weights(tmp_path)
    written, source = (load_file(folder / "model.safetensors") for folder in (tmp_path, model(kind)))
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name]) for name in source)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "saved_under", "loaded_under"),
    [
        ("gemma2", DENSE["TP2 PP2"], ParallelTable()),
        ("gemma2", ParallelTable(), DENSE["TP2"]),
        ("qwen2-moe", MIXTURE["TP2 EP2"], MIXTURE["PP2 EP2"]),
        ("qwen2-moe", MIXTURE["EP2"], ParallelTable()),
    ],
)
def test_family_state_loads_under_other_layout(pool, model, tmp_path, kind, saved_under, loaded_under):
    saved, loaded = (settings(model(kind), "actor", layout) for layout in (saved_under, loaded_under))
    assert resumes_under_layout(pool, saved, loaded, tmp_path) < CHANGE_GAP
