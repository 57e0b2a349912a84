"""Hugging Face <-> Megatron: what a configuration means, and which tensor is which part of which parameter.

No engine is needed for either. The trainer, exports, weights on their way to the generator and `convert-ckpt` read
one table.
"""
