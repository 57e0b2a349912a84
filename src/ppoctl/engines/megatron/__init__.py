"""Actor, critic and reference on Megatron-Core."""

from ppoctl.engines.megatron.import_megatron import import_megatron

# Must precede all other modules of this package, which import Megatron-Core directly: it hides packages first.
import_megatron()
