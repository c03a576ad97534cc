"""The cache without transformers: which tokens are encoded (`policies`) and how they are held (`segments`)."""
