"""The model hub: a fast answer when it cannot be reached, and everything it sends below the user's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wqlab import paths
from wqlab.errors import FetchError, UnknownNameError

#: What a causal language model needs; not the same weights again in other formats.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_TIMEOUT_S = 10


def snapshot(hub_id: str) -> tuple[Path, str]:
    """Return the local folder and the revision of a hub repository, downloading what is missing (with resume).

    The hub is asked once, with a short limit: without a network the answer is a complete earlier download, or one error.

    Raises
    ------
    UnknownNameError
        When the hub has no such repository (or it is private).
    FetchError
        When the hub cannot be reached and the repository is not in the cache.
    """
    # Imported here because it takes a third of a second.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    options: dict[str, Any] = {"cache_dir": paths.cache_dir() / "hub", "allow_patterns": _FILES}
    try:
        revision = str(HfApi().model_info(hub_id, timeout=_TIMEOUT_S).sha)
        return Path(snapshot_download(hub_id, revision=revision, **options)), revision
    except GatedRepoError as error:
        raise FetchError(f"{hub_id} asks for a licence to be accepted on its hub page; log in there, then run it again") from error
    except RepositoryNotFoundError as error:
        unknown = UnknownNameError("model", hub_id, [])
        unknown.args = (f"{hub_id!r} is neither a local folder nor a model that the hub shows to everybody",)
        raise unknown from error
    except Exception as error:  # the hub's HTTP library changes its name, and its errors theirs, between versions
        return _earlier(hub_id, options, error)


def _earlier(hub_id: str, options: dict[str, Any], reason: Exception) -> tuple[Path, str]:
    """Return an earlier complete download; raises FetchError with `reason` when there is none."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, **options))
    except Exception:
        said = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
        raise FetchError(
            f"the hub cannot be reached for {hub_id} ({said}); check the network, or give a local transformers folder"
        ) from reason
    return folder, folder.name
