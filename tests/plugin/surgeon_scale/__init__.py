"""A plugin as anybody can write it: a graft of its own with its operation, and an interpolator."""
