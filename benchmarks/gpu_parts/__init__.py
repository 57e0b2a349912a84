"""The parts of `gpu_first.py`, and the modules that run them.

runner    starts each part in a child process with a time limit, prints a line per part and the table
child     runs one part, and writes a stack dump before its limit
lines     what a part reports: lines of JSON
table     the list of parts: where each is, and how long it takes
measure   seconds, gaps and bytes; it imports torch, and the four modules above do not

machine kernels memory trainer small_memory transfer engines syncing order pair    the parts
models receiver pair_rank                                        modules that they use
"""
