"""Figures that the estimate takes on trust: the name says what, the docstring the unit and the source. Those of a GPU
were read in sources and reports of others; none has been measured there by us ([gpu](../../../../docs/gpu.md)).
"""

MIB, GIB = 2**20, 2**30

RANK_BYTES = 400 * MIB
"""Bytes of Python and libraries on the host in a process before any model. Seen with torch 2.13 for CPUs."""

VLLM_BYTES = 550 * MIB
"""Bytes of the same in a process with vLLM. Seen with vLLM 0.32 for CPUs."""

TEXT_BYTES_PER_TOKEN = 4
"""Bytes of text per token: four characters of plain text."""

CUDA_CONTEXT_BYTES = int(0.6 * GIB)
"""Bytes of a GPU that each process takes for its CUDA context and loaded kernels. 0.5 to 0.6 GiB in reports of torch
on H100."""

COMMUNICATOR_BYTES = GIB // 4
"""Bytes of a GPU that one NCCL communicator takes for its buffers. 0.2 to 0.3 GiB in reports, by links."""

COMMUNICATORS = 5
"""Communicators of a process whose role has several: all, tensor, context, data with context, pipeline. Megatron-Core
makes more groups, most of which never send."""

FRAGMENTS_FRAC = 0.10
"""Share of a pass's activations that lies in fragments beside them, as each microbatch has another length. 0.10 to
0.25 in reports; the low end, as ranks use torch's expandable segments."""

CUDA_GRAPHS_BYTES = GIB
"""Bytes of a GPU that captured graphs of an engine take, also while it sleeps. About 1 GiB in vLLM's log lines for 7B
models."""

STAGING_BYTES = 128 * MIB
"""Bytes of locked host memory through which a rank's state leaves a GPU: two pieces (`megatron.locked_memory`)."""
