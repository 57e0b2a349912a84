"""Conversion between Hugging Face and Megatron: the mapping of tensors to parameters, and both formats on disk.

The package requires no engine. The trainer, exports, weight transfers to the generator, the memory estimate and
`convert-ckpt` all read the same mapping. `ppoctl.models` interprets configurations.
"""
