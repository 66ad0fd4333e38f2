"""Engines: they start processes, give each its first link's address, and report who died."""
