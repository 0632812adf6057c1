"""What is asked: the plan's schema, its YAML, its layer selectors, and the step from plan to blueprint."""
