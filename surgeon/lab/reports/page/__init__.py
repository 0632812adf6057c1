"""The report as one HTML page: its sections."""
