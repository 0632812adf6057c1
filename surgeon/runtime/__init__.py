"""The code that ships inside checkpoints, as readable modules; `surgeon.grafts.bundle` joins them into one file.

It imports torch, transformers and the standard library only.
"""
