"""How well checkpoints foretell text that they never saw: scores of one model, and models beside each other."""
