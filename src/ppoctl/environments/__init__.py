"""Environments that answer the actor's turns: recipe tables, processes, tools."""
