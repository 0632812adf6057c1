"""A page as one HTML file that needs no network: markup, charts, its head and style."""
