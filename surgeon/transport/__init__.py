"""Optimal transport between the rows of two weight matrices: cost, solvers, maps that are applied without copies.

Pure functions on tensors: no files, layers or plans here.
"""
