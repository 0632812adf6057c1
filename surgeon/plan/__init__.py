"""Plans: their schema and YAML, sweeps, the shipped ones, and the step from plan to blueprint."""
