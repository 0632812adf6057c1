"""The training config train.yaml: its schema, its loading, and the settings of a run by it and by the papers."""
