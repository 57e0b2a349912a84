"""Algorithms: step functions, and the specs of the stages that they run. Imports no torch."""
