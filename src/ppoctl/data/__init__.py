"""Prompts: rows of data sets, rendered by the chat template of the model, in a seeded order."""
