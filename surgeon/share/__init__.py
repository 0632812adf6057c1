"""Giving an output away: to the Hub, or a slot of it as a PEFT adapter."""
