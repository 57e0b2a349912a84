"""Estimates of the resources that a run requires, computed before the run starts.

The estimates are computed from the recipe and a config.json. The package imports no torch.

run_plan       the whole plan: batches, updates, data, evaluations
microbatches   number of microbatches of a rank, and their size
algorithm      the choices of the recipe, in words
learning_rate  the schedule of a role
flops          FLOPs of a step
disk           states and records
shapes         shapes of the models of all trained roles
memory/        bytes of each role, rank, stage and node, and whether they fit
"""
