"""Hugging Face <-> Megatron: which tensor is which part of which parameter, and both formats on disk.

Neither needs an engine. The trainer, exports, weight transfers to the generator, the memory estimate and
`convert-ckpt` all read the same table. `ppoctl.model` interprets configurations.
"""
