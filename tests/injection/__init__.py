"""Every command that writes, killed and failed at every call and request, and killed at any moment: see `__main__`."""
