"""Folders written by `convert-ckpt` are read by real gloo ranks of any layout, and their states are converted
back."""

import megatron_lab as lab
import pytest
import torch
from layout_lab import objective_of, parallel_of, settings, started, weights_of

from ppoctl.run.conversion.convert_ckpt import ConvertRequest, convert

DENSE = ("alone", "TP2 sequence", "PP2 uneven", "PP2 interleaved", "TP2 PP2")
MIXED = ("EP2", "TP2 EP2", "TP2, experts split", "PP2 EP2")
CASES = [
    *(("qwen2-deep", layout, role) for layout in DENSE for role in ("actor", "critic")),
    *(("qwen3-moe-mixed", layout, "actor") for layout in MIXED),
    ("gemma2", "TP2 PP2", "critic"),
    ("gemma3", "TP2 PP2", "critic"),
    ("qwen2-moe", "TP2 EP2", "actor"),
    ("deepseek-v3", "TP2 EP2", "actor"),
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


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize(("kind", "layout", "role"), CASES)
def test_converted_checkpoint_starts_under_every_layout_and_its_state_converts_back(
    pool, model, megatron, tmp_path, kind, layout, role
):
    parallel, rollouts = parallel_of(kind, layout), lab.make_rollouts()
    started(pool, settings(model(kind), role, parallel, torch.bfloat16))
    weights = weights_of(pool)
    trained = started(pool, settings(megatron(kind, role), role, parallel, torch.bfloat16))
    lab.assert_same(dict(pool.tensors()), weights)
    trained.update(rollouts, [lab.minibatch(rollouts)], objective_of(role, rollouts))
    (tmp_path / "state").mkdir()
    lab.save(trained, tmp_path / "state")
    request = ConvertRequest(source=str(tmp_path / "state"), to="hf", out=tmp_path / "out", like=str(model(kind)))
    report = convert(request, lambda _: None)
    lab.assert_same(lab.weights_in(tmp_path / "out"), weights_of(pool))
    assert report["role"] == role
    assert report["verified"]
