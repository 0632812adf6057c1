"""A page as one HTML file that needs no network: markup, charts, head and style."""
