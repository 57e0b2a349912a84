"""Checks of whether this machine can run ppoctl. Each check returns findings: one for each requirement of a run.

    examine         the list of checks, and all their findings
    gpus            driver, build of torch, GPUs, compute mode, peer access, NCCL, compiler
    host            packages, shared memory, limits, ports, Ray, Slurm
    folders         the file system of the runs folder

The facts about the machine come from `core/machine/host_info.py`; tests replace them. The checks change nothing:
files that a check writes are deleted at once. The checks do not import vLLM and Megatron-Core. They import torch only
if there are GPUs.
"""
