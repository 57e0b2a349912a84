"""The compute engines: Megatron-Core trains, vLLM generates."""
