"""Continual runs: tasks one after the other, each with a surgery and a training of its own (PMoE)."""
