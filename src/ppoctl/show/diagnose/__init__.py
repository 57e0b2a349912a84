"""`diagnose`: causes of a run that does not learn, found by rules over its journal (docs/reading-curves.md).

    journal, recipe -> `Curves` -> each rule of `examine.RULES` -> symptoms, the most likely cause first -> a sample

A run is only read, whether or not it is in progress. The package imports no torch.
"""
