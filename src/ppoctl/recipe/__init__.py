"""The recipe: all of its tables joined, the keys of no algorithm, and how it is loaded and checked."""
