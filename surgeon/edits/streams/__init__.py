"""A wider residual stream: which tensors grow, and along which axes."""
