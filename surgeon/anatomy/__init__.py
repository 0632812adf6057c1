"""What each architecture calls its parts: found by inspection, proven on a twin, with hints for unusual names."""
