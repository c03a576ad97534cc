"""Measuring what a method costs in quality and memory, on a model and a text or a task."""
