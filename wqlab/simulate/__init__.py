"""Simulators of GPUs for readers who have none: limits, occupancy, bank conflicts. What they give is labelled "simulated"."""
