"""Texts: sources, documents, encoding, packing into sequences, windows and their scores."""
