"""Several processes: how a run was launched, and FSDP2's shares."""
