"""Profiling: what this machine is, and what runs on it cost."""
