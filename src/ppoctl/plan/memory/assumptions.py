"""Constants that the estimate assumes. The docstring of each constant contains its unit and its source.

The constants for GPUs come from the source code and the reports of other projects. ppoctl has not measured them
([gpu](../../../../docs/gpu.md)).
"""

MIB, GIB = 2**20, 2**30

RANK_BYTES = 400 * MIB
"""Host memory of Python and libraries in a process before a model is loaded. Observed with torch 2.13 for CPUs."""

VLLM_BYTES = 550 * MIB
"""Host memory of Python and libraries in a process with vLLM. Observed with vLLM 0.32 for CPUs."""

ENVIRONMENT_BYTES = 35 * MIB
"""Host memory of a process that answers turns, before an environment is opened. Observed with Python 3.11."""

TEXT_BYTES_PER_TOKEN = 4
"""Bytes of text per token: four characters of plain text."""

CUDA_CONTEXT_BYTES = int(0.6 * GIB)
"""GPU memory of the CUDA context and loaded kernels of each process. 0.5 to 0.6 GiB in reports of torch on H100."""

COMMUNICATOR_BYTES = GIB // 4
"""GPU memory of the buffers of one NCCL communicator. 0.2 to 0.3 GiB in reports, depending on the links."""

COMMUNICATORS = 5
"""Number of communicators of a process whose role has several processes. The communicators are: all ranks, tensor,
context, data with context, pipeline. Megatron-Core creates more groups, most of which never communicate."""

FRAGMENTS_FRAC = 0.10
"""Fragmentation as a fraction of the activations of a pass. It occurs because microbatches have different lengths.
Reports have 0.10 to 0.25. The estimate uses the low end, because ranks use torch's expandable segments."""

CUDA_GRAPHS_BYTES = GIB
"""GPU memory of the CUDA graphs of an engine, also while the engine sleeps. About 1 GiB in vLLM's logs (7B)."""

STAGED_PARAMETERS = 2**23
"""Largest number of parameters that an optimizer on the host steps at a time (`megatron.host_optimizer`)."""

STAGING_BYTES = 128 * MIB
"""Pinned host memory through which a rank copies its state from the GPU: two buffers (`megatron.pinned_memory`)."""
