"""The generator: real vLLM, in processes of its own.

settings      what an engine is started with: light
environment   variables that are read when vLLM is imported
engine        vLLM's engine behind few verbs; weights, loader: new weights in it
pooling       the engine of a reward model
hosts         how processes make engines, and how a driver without Ray reaches one
fleet         engines that share one queue
generator     the port
log           what vLLM says of itself
"""
