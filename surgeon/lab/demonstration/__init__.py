"""The demonstration: make a small real base on the spot, so that everything can be tried offline."""
