"""tasks.yaml: its schema, its loading, and the settings of each task that follow from it."""
