"""Steps: transformers' Trainer with our optimizer, batches, schedule of evaluations, and trackers."""
