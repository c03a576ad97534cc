"""wqlab."""
