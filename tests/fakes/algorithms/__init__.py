"""Test algorithms: one module each, unknown to ppoctl. Each has a step function, the specs of its own stages, a
recipe, and `choose`."""
