"""Numbers that tell before anything starts what a recipe will take: from the recipe and a config.json, without torch.

arithmetic    the whole plan: batches, updates, data, evaluations
microbatches  how many a rank has, and how full they are
disk          states and records
memory/       bytes of every role, rank, stage and node, and whether they fit
"""
