"""Optimal transport between the rows of two weight matrices: cost, solvers, and maps that are applied without copies.

Pure functions on tensors: no files, layers or plans here.
"""
