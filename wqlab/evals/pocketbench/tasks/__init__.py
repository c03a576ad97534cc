"""Task types, one file each: ``make(builder)`` places the sprites of a video and returns its question. Registered as ``task``."""
