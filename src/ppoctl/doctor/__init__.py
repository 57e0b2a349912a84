"""Checks of whether this machine can run ppoctl. Each check gives one finding for each requirement of a run.

    examine         the list of checks, and all their findings
    finding         result of a check: ok, a warning, or wrong with the command that fixes it
    gpus            driver, build of torch, GPUs, compute mode, peer access, NCCL, compiler
    host            packages, shared memory, limits, ports, Ray, Slurm
    folders         the file system of the runs folder
    recipe_checks   what a recipe requires: model, devices, memory, MLflow, a running Ray

The facts about the machine are in `machine/host_info.py`; tests replace them. The checks change nothing: files
that they write are deleted at once. vLLM and Megatron-Core are not imported, and torch only if there are GPUs.
"""
