"""What can be told of an output: facts gathered from its manifest, headers, weights and runs. Draws nothing."""
