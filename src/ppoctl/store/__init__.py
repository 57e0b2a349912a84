"""The run directory: its paths, atomic artifacts, reuse of committed stages, states, journal, ledger."""
