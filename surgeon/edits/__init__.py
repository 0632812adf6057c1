"""All operations outside `surgeon.operations`, one module each, found by its place; shared code has its own modules."""
