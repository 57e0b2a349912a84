"""Bytes of a run before launch, as functions of a model's numbers (`model.shape`) and of the recipe.

    pipeline     layers and parameters of a rank
    activations  what a forward pass keeps for its backward pass, and what it needs while it runs; of a layer:
    attention    with its norms, plain, latent, or with scores written out
    mlp          or experts
    trainer      one rank of actor or critic: weights, gradients, optimizer, activations
    scoring      one rank of a reward model: weights, activations
    generator    vLLM: engines, weights, KV cache, weights on their way
    driver       the process that holds the rollouts: records, what ranks are sent
    items        the list: whatever takes memory, a line each
    residency    when each of them is in memory, and when it is elsewhere
    pools        sums over the list: a GPU, a machine, a node's host, stage by stage, and whether it fits

Estimates of trainers are held against tensors of real engines by tests/engines/megatron/test_memory_estimates.py.
"""
