"""Batch: save figures with their sidecars, execute notebooks, and run all of them, resumably."""
