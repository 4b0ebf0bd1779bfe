"""The attacks as values."""
