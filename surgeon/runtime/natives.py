"""What surgeon calls the model types and the file of its upcycled classes."""

from __future__ import annotations

# An output with grafts is of the model type `upcycled_` and its base's.
PREFIX = "upcycled_"
MODULE = "modeling_surgeon"
