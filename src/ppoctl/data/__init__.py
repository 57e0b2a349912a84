"""Prompts: rows of data sets, rendered with the chat template of the model, in an order that the seed determines."""
