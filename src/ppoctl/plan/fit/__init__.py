"""The search of `ppoctl plan --fit`: recipes that fit on a number of GPUs, the cheapest first.

choices     settings that the search may change, and the recipe with them
moves       table of these settings: keys, effect on the time of a step, effect on the results
footprint   GPU memory of each process by stage, so that the memory of many recipes is a sum
seconds     estimated time of a step
search      the search
proposals   the recipes found, checked with the estimate of `plan`, with as few changes as possible
"""
