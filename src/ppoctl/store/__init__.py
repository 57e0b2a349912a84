"""What survives a crash: layout of a run directory, atomic artifacts, once, states, journal, ledger."""
