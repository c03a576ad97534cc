"""Window search: which windows of the cache keep how many bits (WindowQuant, Sect. 3.2).

`search` does it all: a scorer (`scorers`, on `similarity`) gives each window of a `batch` a score, `thresholds` turns the layers'
`importance` into limits, and `plan` compares the two.
"""
