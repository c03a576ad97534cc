"""The pocket VLM: EfficientNet-Lite0 sees, SmolLM2-135M speaks, and a small projector trained here joins them."""
