"""Actor, critic and reference on Megatron-Core."""

from ppoctl.engines.megatron.cpu_adaptation import import_megatron

# Before any other module of this package: they import Megatron-Core by name.
import_megatron()
