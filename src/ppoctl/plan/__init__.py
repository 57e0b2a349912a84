"""Estimates of the resources that a run requires, computed before the run starts.

The estimates are computed from the recipe and a config.json. The package imports no torch.

run_plan        the whole plan: batches, updates, data, evaluations
algorithm       the choices of the recipe, in words
step_work       uses of models in a step: the basis of FLOPs, seconds and residency
flops           FLOPs of a step
disk_space      states and records
transfer        bytes of weights that are sent to the engines, and seconds of it as measured
trained_part    parameters of a role that train
shared_sizes    shapes of models, rows of stages, microbatches of a rank
fit/            `plan --fit`: settings with which a recipe fits on some GPUs
memory/         bytes of each role, rank, stage and node, and whether they fit
"""
