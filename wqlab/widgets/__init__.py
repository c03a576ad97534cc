"""Widgets: sliders over an experiment's parameters."""
