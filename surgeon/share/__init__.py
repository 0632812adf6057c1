"""Publication of an output: on the Hub, or one of its slots as a PEFT adapter."""
