"""Texts: where they lie, documents, encoding, packing into sequences, windows and their scores."""
