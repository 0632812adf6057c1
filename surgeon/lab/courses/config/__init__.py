"""tasks.yaml: its schema, its loading, and the settings that it gives each task."""
