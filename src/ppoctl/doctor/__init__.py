"""Whether this machine, or this node, can run ppoctl: one finding for each thing that a run stands on.

    examine   the list of checks, and all their findings
    finding   what a check found: ok, a warning, or wrong with the command that mends it
    machine   what is read of a machine, once; tests make one up
    gpus      driver, torch's build, GPUs, compute mode, peer access, NCCL, compiler
    host      packages, shared memory, limits, ports, Ray, Slurm
    folders   the file system that runs are written to
    asked     what a recipe needs: model, devices, memory, MLflow, a Ray that runs

Nothing is changed: what is written to see whether it can be is removed at once. Neither vLLM nor Megatron-Core is
imported, and torch only where there are GPUs for it.
"""
