"""Bytes of a run before launch, as functions of a model's numbers (`model.shape`) and of the recipe.

    pipeline     layers and parameters of a rank
    activations  what a forward pass keeps for its backward pass, and what it needs while it runs; of a layer:
    attention    with its norms, plain, latent, or with scores written out
    mlp          or experts
    trainer      one rank of actor or critic: weights, gradients, optimizer, activations
    generator    vLLM: engines, weights, KV cache, weights on their way
    driver       the process that holds the rollouts: records, object store, disk
    node         host memory of the fullest node
    items        which of it lies on a GPU, or on the machine
    residency    what is in memory in each stage, and whether it fits

Estimates of trainers are held against tensors of real engines by tests/engines/megatron/test_memory_estimates.py.
"""
