"""The code that ships inside checkpoints, as readable modules, and how it is joined into one file.

What ships imports torch, transformers and the standard library only; `bundle`, `known` and `composition` do
not ship and import neither.
"""
