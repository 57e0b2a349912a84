"""Facts about this machine: GPUs, devices, memory, versions, load."""
