"""Prompts: rows of files, rendered by the model's chat template, in a seeded order."""
