"""`surgery.json`: the record of what was done to a checkpoint, its lineage, which tensors train, and the model card."""
