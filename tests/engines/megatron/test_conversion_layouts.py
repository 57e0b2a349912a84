"""Folders written by `convert-ckpt` are read by real gloo ranks of any layout, and their states are converted
back."""

import megatron_lab as lab
import pytest
import torch
from layout_lab import settings, trainer
from safetensors.torch import load_file

from ppoctl.convert.command.convert_ckpt import ConvertRequest, convert
from ppoctl.recipe.schema import ParallelTable

DENSE = {
    "alone": ParallelTable(),
    "TP2": ParallelTable(tensor=2, sequence=True),
    "PP2 uneven": ParallelTable(pipeline=2, first_stage_layers=1),
    "PP2 interleaved": ParallelTable(pipeline=2, stages_per_rank=2),
    "TP2 PP2": ParallelTable(tensor=2, pipeline=2),
}
MIXED = {
    "EP2": ParallelTable(data=2, expert=2),
    "EP2 of TP2": ParallelTable(tensor=2, expert=2, sequence=True),
    "TP2, experts split": ParallelTable(tensor=2, expert_tensor=2, sequence=True),
    "PP2 EP2": ParallelTable(pipeline=2, data=2, expert=2),
}
LAYOUTS = {**DENSE, **MIXED}
CASES = [
    *(("qwen2-deep", layout, role) for layout in DENSE for role in ("actor", "critic")),
    *(("qwen3-moe-mixed", layout, "actor") for layout in MIXED),
    ("gemma2", "TP2 PP2", "critic"),
    ("qwen2-moe", "EP2 of TP2", "actor"),
    ("deepseek-v3", "EP2 of TP2", "actor"),
]


@pytest.fixture(scope="module")
def megatron(model, tmp_path_factory):
    """Return a model as a Megatron folder."""
    root = tmp_path_factory.mktemp("megatron")

    def folder(kind, role):
        out = root / f"{kind}-{role}"
        if not out.exists():
            convert(ConvertRequest(source=str(model(kind)), to="megatron", out=out, role=role), lambda _: None)
        return out

    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "layout", "role"), CASES)
def test_converted_checkpoint_starts_under_every_layout(pool, model, megatron, kind, layout, role):
    expected = trainer(pool, settings(model(kind), role, LAYOUTS[layout]))
    expected.start()
    weights = {each: tensor.clone() for each, tensor in pool.tensors()}
    started = trainer(pool, settings(megatron(kind, role), role, LAYOUTS[layout]))
    started.start()
    found = dict(pool.tensors())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[each], weights[each]) for each in weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "layout", "role"), CASES)
def test_state_of_every_layout_converts_to_hugging_face(pool, model, tmp_path, kind, layout, role):
    trained = trainer(pool, settings(model(kind), role, LAYOUTS[layout], torch.bfloat16))
    trained.start()
    rollouts = lab.make_rollouts()
    is_actor = role == "actor"
    objective = lab.policy_objective(rollouts) if is_actor else lab.value_objective(rollouts)
    trained.update(rollouts, [lab.minibatch(rollouts)], objective)
    (tmp_path / "state").mkdir()
    lab.save(trained, tmp_path / "state")
    weights = {each: tensor.clone() for each, tensor in pool.tensors()}
    request = ConvertRequest(source=str(tmp_path / "state"), to="hf", out=tmp_path / "out", like=str(model(kind)))
    report = convert(request, lambda _: None)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[each], weights[each]) for each in weights)
    assert report["role"] == role
    assert report["verified"]
