"""Estimates of what a run costs, before it starts: from the recipe and a config.json, without torch.

run_plan       the whole plan: batches, updates, data, evaluations
microbatches   number of microbatches of a rank, and their size
algorithm, reward_shaping   the choices of the recipe, in words
learning_rate  the schedule of a role
flops          FLOPs of a step
disk           states and records
memory/        bytes of each role, rank, stage and node, and whether they fit
"""
