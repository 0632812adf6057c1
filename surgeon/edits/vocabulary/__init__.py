"""Growing a tokenizer: learned pieces, whole words, and what they make of texts."""
