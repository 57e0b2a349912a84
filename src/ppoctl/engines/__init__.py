"""Who does the heavy work: Megatron-Core trains, vLLM generates."""
