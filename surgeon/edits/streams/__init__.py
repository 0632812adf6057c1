"""The residual stream of a model that becomes wider: which tensors grow, and which side of them it is."""
