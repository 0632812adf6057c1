"""Two operations that need more of a base than headers: one drops layers by a measure of its own, one adds tokens."""
