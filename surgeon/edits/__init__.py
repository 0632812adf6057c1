"""Every operation beside those of the papers: a file each, which nothing else names; what two share has its own."""
