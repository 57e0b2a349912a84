"""The search of `ppoctl plan --fit`: recipes that fit on a number of GPUs, the cheapest first.

choices     settings that the search may change: keys, effects on time and results; the recipe with them
footprint   GPU memory of each process by stage, so that the memory of many recipes is a sum
seconds     estimated time of a step
search      the search
proposed    the recipes found, checked with the estimate of `plan`, with as few changes as possible
"""
