"""Memory estimates of a run, computed from the shape of the model (`models.shape`) and the recipe.

    pipeline           layers of a rank
    parameter_memory   parameters of a rank: all, and those that train
    gradients          layer by layer: parameters with a gradient, and what adapters keep
    activations        memory that a forward pass keeps for its backward pass, and peak memory while it runs
    attention_memory   activations of attention and norms: plain, latent, or with materialized scores
    mlp                activations of MLPs and experts
    trainer_memory     one rank of a trained role: weights, gradients, optimizer, activations
    scoring            one rank of a reward model: weights, activations
    generator_memory   vLLM: engines, weights, KV cache, weights in transfer
    driver             the process that holds the rollouts: records, inputs of ranks
    items              the list of all memory items
    residency          the stages during which each item is in memory
    pools              sums of the items of a GPU, a machine or the host of a node, by stage, and whether the sums fit

tests/engines/megatron/test_memory_estimates.py compares the estimates with the tensors of real trainers.
"""
