"""Checkpoints made from outputs: branches merged, surgeries reverted, deltas made and applied."""
