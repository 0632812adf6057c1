"""Runs of several processes: how they were launched, and sharding by FSDP2."""
