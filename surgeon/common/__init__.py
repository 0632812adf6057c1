"""Helpers for all rooms: strict YAML, progress, timing, devices, several processes. Independent of models."""
