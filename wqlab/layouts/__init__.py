"""Versioned arrangements of codes in memory; pack and unpack in plain torch."""
