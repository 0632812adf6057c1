"""The laboratory: what measures, compares and shows, built on the names that `surgeon` offers."""
