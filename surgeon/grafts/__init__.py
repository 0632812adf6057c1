"""Grafts for planners, and the composing and joining of the file that ships with them."""
