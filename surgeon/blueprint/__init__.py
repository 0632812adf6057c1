"""Pure data between a plan and its output: the draft, recipes, grafts, shards. Reads no weight."""
