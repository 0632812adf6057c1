"""`surgery.json`: what was done to a checkpoint, its lineage, what of it trains, and the card written from it."""
