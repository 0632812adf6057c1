"""Training steps: transformers' Trainer with surgeon's optimizer, batches, schedule of evaluations, and trackers."""
