"""The report as one HTML page: sections, charts, markup."""
