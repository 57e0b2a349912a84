"""Actor, critic and reference on Megatron-Core."""

from ppoctl.engines.megatron.import_megatron import import_megatron

# Before any other module of this package: they import Megatron-Core by name.
import_megatron()
