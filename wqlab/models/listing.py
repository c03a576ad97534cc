"""What `wqlab models list` shows."""

from __future__ import annotations

from typing import Any

from wqlab.models import catalog, fetch, manifest, shipped, smollm2


def status() -> list[dict[str, Any]]:
    """Return one row per part of the catalogue and per model that travels with wqlab, without reading large files.

    Returns
    -------
    list of dict
        ``name``, ``kind``, ``description``, ``licence``, ``download_bytes``, ``fetched`` (bool), ``bytes`` (on disk, 0 when not
        fetched), ``path`` (where it is or would be), ``source`` (None when not fetched) and ``get`` (the command that makes it).
    """
    rows = []
    for part in catalog.PARTS.values():
        folder = smollm2.folder() if part.name == smollm2.NAME else fetch.folder_of(part.name)
        found = manifest.read(folder)
        rows.append(
            {
                "name": part.name,
                "kind": part.kind,
                "description": part.description,
                "licence": part.licence,
                "download_bytes": part.download_bytes,
                "fetched": found is not None,
                "bytes": sum(file.num_bytes for file in found.files) if found else 0,
                "path": str(folder),
                "source": found.source if found else None,
                "get": f"wqlab models fetch {part.name}",
            }
        )
    return [*rows, shipped.status()]
