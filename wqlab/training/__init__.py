"""Training of the small models that this project publishes: the pocket VLM's projector and adapters."""
