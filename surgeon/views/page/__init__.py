"""The report as one HTML page that needs nothing but a browser: no script, no network, no font of its own."""
