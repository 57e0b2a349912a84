"""The generator: real vLLM, in this process or in others.

Importing this package does not import vLLM; the first `generate` does. `prepare_environment` should run early in a
process that will generate, before torch.compile or Hugging Face are first used.
"""

from ppoctl.engines.vllm.environment import prepare_environment
from ppoctl.engines.vllm.generator import VllmGenerator
from ppoctl.engines.vllm.hosts import OpenEngine, this_process
from ppoctl.engines.vllm.pooling import OpenPooling, PoolingEngine, PoolingHere, PoolingSettings, VllmRewardModel
from ppoctl.engines.vllm.settings import VllmSettings

__all__ = [
    "OpenEngine",
    "OpenPooling",
    "PoolingEngine",
    "PoolingHere",
    "PoolingSettings",
    "VllmGenerator",
    "VllmRewardModel",
    "VllmSettings",
    "prepare_environment",
    "this_process",
]
