"""Rotary frequencies are bitwise equal to those of transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ppoctl.models.convert.inv_freq import inv_freq
from ppoctl.models.rope import read_rope
from ppoctl.models.shape_fields import UnsupportedValueError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3,
        {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 512},
        YARN,
        {**YARN, "mscale": 1.0, "beta_fast": 7, "beta_slow": 0.1, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4, "original_max_position_embeddings": 32768},
        # Both ends are the first pair, so the ramp is a step.
        {**YARN, "beta_fast": 700, "beta_slow": 690},
    ],
)
def test_scaled_rope_frequencies_equal_transformers(parameters, head_dim):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2**17,
        rope_parameters=parameters,
    )
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    assert read_rope(parameters).attention_factor == pytest.approx(scale, rel=1e-12)
    actual = inv_freq(read_rope(parameters), head_dim)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, inv_freq(read_rope({"rope_theta": parameters["rope_theta"]}), head_dim))


def test_plain_rope_frequencies_equal_worked_values():
    """Four channels at base 100: the pairs rotate by 1 and 1/10 radians per token."""
    torch.testing.assert_close(inv_freq(read_rope({"rope_theta": 100}), 4), torch.tensor([1.0, 0.1]))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0], "short_factor": [1.0]},
        {"rope_type": "linear", "rope_theta": 1e4},
        {**YARN, "attention_factor": 1.0},
        {**YARN, "truncate": False},
        {key: value for key, value in YARN.items() if key != "mscale"},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
)
def test_other_rope_kinds_are_refused_with_the_supported_kinds(parameters):
    with pytest.raises(UnsupportedValueError, match="linear with factor; llama3 with factor, low_freq_factor"):
        read_rope(parameters)
