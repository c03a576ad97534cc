"""The model hub: a fast answer when it cannot be reached, and everything it sends below wqlab's own cache."""

from __future__ import annotations

from pathlib import Path

from wqlab import paths
from wqlab.errors import FetchError, UnknownNameError

#: What a causal language model needs; not the same weights again in other formats.
FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
_TIMEOUT_S = 10


def snapshot(hub_id: str) -> tuple[Path, str]:
    """Return the local folder and the revision of a hub repository, downloading what is missing (with resume).

    Without a network this is a complete earlier download, or one error, at once.

    Raises
    ------
    UnknownNameError
        When the hub has no such repository (or shows it to its members only).
    FetchError
        When the hub cannot be reached and the repository is not in the cache.
    """
    # Imported here because it takes a third of a second.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = snapshot_download(hub_id, cache_dir=paths.cache_dir() / "hub", allow_patterns=list(FILES), etag_timeout=_TIMEOUT_S)
    except GatedRepoError as error:
        raise FetchError(
            f"{hub_id} asks for its licence to be accepted on its hub page; do so, log in, and run it again"
        ) from error
    except RepositoryNotFoundError as error:
        unknown = UnknownNameError("model", hub_id, [])
        unknown.args = (f"unknown model {hub_id!r}: no local folder, and the hub shows no such repository",)
        raise unknown from error
    except Exception as error:  # the hub's HTTP library, and with it the errors, changes between versions
        said = str(error.__cause__ or error).strip() or type(error).__name__
        raise FetchError(
            f"{hub_id} cannot be taken from the hub ({said.splitlines()[0]}); check the network and run it again (what was "
            "downloaded is kept), or give a local transformers folder"
        ) from error
    return Path(folder), Path(folder).name
