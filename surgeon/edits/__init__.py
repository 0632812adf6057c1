"""All operations outside `surgeon.operations`: one file each, found by its file; code of two has its own file."""
