"""Plain data between a plan and its output: the draft, recipes, grafts and shards. No weight is read here."""
