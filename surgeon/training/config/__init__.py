"""train.yaml: its schema, its loading, and the settings that it and the papers give a run."""
