"""Window search: which windows of the cache keep how many bits (WindowQuant, Sect. 3.2)."""
