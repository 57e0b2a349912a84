"""The machine and its packages."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from gpu_parts.lines import notify
from gpu_parts.measure import BF16, CUDA, DEV, fix_allocator, fix_varlen, gib, seconds

SMI = (
    "driver_version,compute_mode,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
    "pcie.link.width.max,power.limit"
)
"""Fields queried from `nvidia-smi`."""


def env():
    """Report this machine and its packages, and how fast it multiplies and copies."""
    _host()
    notify(
        "env", torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0], cores=os.cpu_count()
    )
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        notify(
            "env",
            gpu=properties.name,
            gib=gib(properties.total_memory),
            sms=properties.multi_processor_count,
            free=gib(torch.cuda.mem_get_info()[0]),
            nccl=torch.cuda.nccl.version(),
            cudnn=torch.backends.cudnn.version(),
        )
        a, b = (torch.randn(8192, 8192, device=DEV, dtype=BF16) for _ in range(2))
        notify("env", matmul_tflops=round(2 * 8192**3 / seconds(lambda: a @ b) / 1e12))
        x = torch.empty(2**31, dtype=torch.uint8, device=DEV)
        notify("env", copy_tb_s=round(2 * x.numel() / seconds(lambda: x.clone()) / 1e12, 2))
    notify(
        "env",
        varlen=fix_varlen(),
        allocator=fix_allocator(),
        grouped_mm=hasattr(torch.nn.functional, "grouped_mm"),
        addmm_out_dtype="dtype_out" in torch.ops.aten.addmm.overloads(),
    )
    # ppoctl's module first: it hides Transformer Engine and Apex from Megatron-Core, which leaves None in
    # `sys.modules`.
    import ppoctl.engines.megatron.rank  # noqa: F401

    import megatron.core  # isort: skip

    hidden = sys.modules.get("transformer_engine") is None
    notify("env", ppoctl="imports", megatron=megatron.core.__version__, te=not hidden)
    _doctor()


def _host():
    """Report the machine around the GPU: driver, memory, limits, and the requirements of a compiler."""
    notify(
        "env",
        smi=_printed("nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"),
        free=_printed("free", "-g"),
        cgroup_memory=_read(Path("/sys/fs/cgroup/memory.max")),
        shm_gib=gib(shutil.disk_usage("/dev/shm").free),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
    )


def _limit(which):
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _read(file):
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _printed(*command):
    """Return the output of a command, or why it has none."""
    if shutil.which(command[0]) is None:
        return f"no {command[0]}"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return (ended.stdout or ended.stderr).strip()


def _doctor():
    """Report the results of `ppoctl doctor`, including gcc and Python.h."""
    try:
        from ppoctl.core.machine.host_info import this_machine
        from ppoctl.start.doctor.examine import findings, of_machine
    except ImportError as error:
        notify("env", doctor=f"not asked: {error}")
        return
    for found in findings(of_machine(this_machine(), Path.cwd())):
        notify("env", doctor=found.where, finding=found.level.value, seen=found.what)
