"""The code that ships inside checkpoints, as readable modules, and how it is joined into one file.

What ships imports torch, transformers and the standard library only; `bundle`, `joined`, `natives` and `template` do
not ship and import neither.
"""
