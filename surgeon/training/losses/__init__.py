"""The terms of a step's loss: the cross-entropy of the text, and terms that keep the model near its base."""
