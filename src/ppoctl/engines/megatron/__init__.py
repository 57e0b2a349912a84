"""Actor, critic and reference on Megatron-Core."""

from ppoctl.engines.megatron.import_megatron import import_megatron

# This call must precede the imports of the package's other modules: it hides packages that Megatron-Core would use.
import_megatron()
