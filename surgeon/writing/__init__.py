"""From a plan to a written checkpoint: preview, preflight, writing, computing, reading back."""
