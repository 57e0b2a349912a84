"""Construction of a run's objects from its recipe: engines, then stages, then the run context. Only this package
combines engines with stages."""
