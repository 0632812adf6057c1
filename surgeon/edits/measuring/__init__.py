"""What edits measure of a base by running it: modules that import torch."""
