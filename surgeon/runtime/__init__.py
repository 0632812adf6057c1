"""The code that ships inside checkpoints, as modules; `surgeon.grafts.bundle` joins them into `modeling_surgeon.py`.

It imports only torch, transformers and the standard library.
"""
