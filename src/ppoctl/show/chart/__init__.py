"""Plots of metrics over steps: contents (`panel`), axes (`axis`), and lines of text for a terminal (`terminal`).

A picture (`drawing`) consists of shapes, and is written as SVG (`svg`) or PNG (`png`). The package has no access
to the files of a run.
"""
