"""What trains in a loaded model: exactly the wanted parameters, set and checked."""
