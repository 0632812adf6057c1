"""The names and roles of each architecture's parts: found by inspection, proven on a twin, with hints if unusual."""
