"""The version of surgeon; outputs name it, and a staged folder of another version is never continued."""

__version__ = "0.1.0"
