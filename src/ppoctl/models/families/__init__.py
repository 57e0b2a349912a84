"""Model families, by `model_type` of config.json; each is a small table of fields."""

from ppoctl.models.families.deepseek_v3 import DEEPSEEK_V3
from ppoctl.models.families.gemma import GEMMA2, GEMMA3
from ppoctl.models.families.llama import LLAMA
from ppoctl.models.families.mistral import MISTRAL
from ppoctl.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from ppoctl.models.shape_fields import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}
