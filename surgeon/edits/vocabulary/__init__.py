"""Growing and trimming a tokenizer: learned pieces, whole words, and how texts are tokenised afterwards."""
