"""Training what a surgery made: which parameters train, on what data, how it is saved and published."""
