"""Plans: their schema and YAML, the shipped ones, and the step from plan to blueprint."""
