"""The list of parts, in the order in which they run: the parts that decide whether anything works come first."""

from dataclasses import dataclass
from typing import Literal

PART_LIMIT_S = 120.0
"""Time limit of a part without its own limit."""
TINY_S = 60.0
"""Most seconds of a part in a dry run."""


@dataclass(frozen=True)
class Part:
    """One part: a function that measures and reports lines."""

    name: str
    entry: str
    """Function of the part, written as `module:function`."""
    expected_s: float
    """Estimated seconds on an H100, including the imports of its process."""
    limit_s: float = PART_LIMIT_S
    """Time limit, unless `--part-limit` is given."""
    needs_vllm: bool = False
    on_cpu: Literal["yes", "tiny", "no"] = "tiny"
    """Whether it runs without CUDA: always, in a dry run (`--tiny`), or never."""
    figures: tuple[str, ...] = ()
    """Fields that the screen shows, each from the last line that has it."""


def _of(module: str, name: str, expected_s: float, **others: object) -> Part:
    return Part(name, f"gpu_parts.{module}:{name}", expected_s, **others)  # type: ignore[arg-type]


_PARTS = (
    _of("machine", "env", 30, on_cpu="yes", figures=("gpu", "cores", "matmul_tflops", "copy_tb_s")),
    _of("kernels", "attention", 25, figures=("varlen_fwd_tflops", "varlen_bwd_tflops", "kernel", "verdict")),
    _of("memory", "ipc", 20, figures=("right", "put_ms", "free_after")),
    _of("transfer", "transfer", 110, limit_s=180, figures=("way", "gib", "gb_s", "restored_s", "freed_gib")),
    _of("memory", "pinned", 22, figures=("out_gb_s", "back_gb_s", "right")),
    _of("trainer", "rank", 170, limit_s=240, figures=("mfu", "peak_gib", "plan_peak", "leave_s", "back_s")),
    _of("small_memory", "lora", 62, figures=("mfu", "measured_peak", "plan_peak")),
    _of("small_memory", "optimizer", 90, figures=("optimizer", "s", "measured_peak", "plan_peak")),
    _of("engines", "start", 110, limit_s=180, needs_vllm=True, figures=("start_s", "blocks", "backend")),
    _of("engines", "generate", 120, limit_s=240, needs_vllm=True, figures=("seqs", "tokens_s", "ms_per_step")),
    _of("engines", "rollout", 200, limit_s=300, needs_vllm=True, figures=("side", "tokens_s", "of_bare")),
    _of("engines", "sleep", 70, limit_s=180, needs_vllm=True, figures=("before_gib", "awake_gib", "asleep_gib")),
    _of("syncing", "sync", 150, limit_s=240, needs_vllm=True, figures=("dtype", "s", "gap_max", "gap_mean")),
    _of(
        "mixture",
        "mixture",
        110,
        limit_s=240,
        needs_vllm=True,
        figures=("takes", "s", "gap_max", "gap_own", "gap_given", "differ", "right"),
    ),
    _of("order", "order", 150, limit_s=300, needs_vllm=True, figures=("peak_gib", "plan_gib", "stage")),
    _of("pair", "pair", 150, limit_s=300, figures=("layout", "change_gap", "nccl_gib", "plan_nccl_gib", "start_s")),
    _of("trainer", "variants", 120, limit_s=300, figures=("variant", "verdict")),
    _of("kernels", "logprobs", 40, figures=("chunk", "how", "ms", "gap")),
    _of("trainer", "shard", 48, figures=("mfu", "peak_gib")),
    _of("memory", "prints", 25, figures=("gb_s", "extra_gib")),
    _of("kernels", "experts", 30, figures=("how", "tflops", "gap")),
    _of("trainer", "soak", 90, limit_s=180, figures=("turn", "peak", "reserved")),
    _of("kernels", "capped", 70, figures=("how", "ms", "gap")),
)
PARTS = {part.name: part for part in _PARTS}
