"""What every room may use: strict YAML, progress, timing, devices, several processes. Knows nothing of models."""
