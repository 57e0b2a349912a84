"""Hugging Face <-> Megatron: which tensor is which part of which parameter, and both formats on disk.

No engine is needed for either. The trainer, exports, weights on their way to the generator, the memory estimate and
`convert-ckpt` read one table. What a configuration means is said in `ppoctl.model`.
"""
