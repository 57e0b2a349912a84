"""Bytes before launch: functions of the numbers in config.json and in the recipe, without torch.

    decoder      config.json -> the numbers of a model, and its parameters, whole or of one rank
    activations  what a forward pass keeps for its backward pass, and what it needs while it runs
    trainer      one rank of actor or critic: weights, gradients, optimizer, activations
    generator    vLLM: engines, weights, KV cache, weights on their way
    driver       the process that holds the rollouts: records, object store, disk
    items        which of it lies on a GPU, or on the machine
    residency    what is in memory in each stage, and whether it fits

Estimates of trainers are held against tensors of real engines by tests/engines/megatron/test_memory_estimates.py.
"""
