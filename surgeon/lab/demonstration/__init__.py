"""The embedded default: a small real base made on the spot, so that everything can be tried offline."""
