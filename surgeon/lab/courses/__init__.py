"""Continual runs: tasks one after another, each with its own surgery and training (PMoE)."""
