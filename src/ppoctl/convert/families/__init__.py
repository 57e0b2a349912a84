"""One small table per model family: `model_type` of config.json -> `Family`."""

from ppoctl.convert.families.deepseek_v3 import DEEPSEEK_V3
from ppoctl.convert.families.family import Family
from ppoctl.convert.families.gemma2 import GEMMA2
from ppoctl.convert.families.llama import LLAMA
from ppoctl.convert.families.qwen2 import QWEN2
from ppoctl.convert.families.qwen2_moe import QWEN2_MOE
from ppoctl.convert.families.qwen3 import QWEN3
from ppoctl.convert.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "gemma2": GEMMA2,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}
