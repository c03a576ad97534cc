"""English prose that every Python carries: the language reference in `pydoc_data.topics`, without its markup.

Perplexity needs running text of some hundred kilobytes. This one needs no download and no licence beyond Python's.
"""

from __future__ import annotations

import hashlib
import platform
import re
from typing import TYPE_CHECKING, Any

from wqlab.errors import ParameterError
from wqlab.types import Input

if TYPE_CHECKING:
    import torch

#: A paragraph that ends a sentence and has this many words is prose; shorter ones are captions, signatures and list heads.
_MIN_WORDS = 12


def text() -> str:
    """Return the prose: paragraphs of whole sentences, one a line, topics in alphabetical order.

    Headings, tables, code, grammar productions and signatures are left out, and the markers of emphasis, because a language model
    has seen sentences rather than reStructuredText.
    """
    from pydoc_data import topics

    found: dict[str, None] = {}  # ordered and without repetition: some sections stand under several topics
    for name in sorted(topics.topics):
        for block in re.split(r"\n\s*\n", topics.topics[name]):
            paragraph = _paragraph(block)
            if paragraph:
                found[paragraph] = None
    return "\n".join(found)


def _paragraph(block: str) -> str | None:
    """Return a block of lines as one line of plain prose, or None when it is something else."""
    lines = [line for line in block.splitlines() if line.strip()]
    if not lines:
        return None
    indents = [len(line) - len(line.lstrip()) for line in lines]
    joined = re.sub(r"(\w-) (?=\w)", r"\1", " ".join(line.strip() for line in lines))  # words that were broken at a hyphen
    if "::=" in joined or ">>>" in joined or re.search(r"[-=*~^|+]{4,}|-\[ ", joined):
        return None  # a grammar production, a session, a table or a heading
    if len(set(indents)) > 1:
        return None  # code, lists and definitions step in and out; prose keeps its margin
    joined = re.sub(r"\*\*?([^*\s][^*]*)\*\*?", r"\1", joined)  # *emphasis*
    joined = re.sub(r"\s*\[\d+\]|\s*\(see [^)]*\)", "", joined)  # footnotes and cross references
    joined = re.sub(r"\s+", " ", joined).replace("‘", "").replace('’"', '"').strip()
    if len(joined.split()) < _MIN_WORDS or not re.match(r"[A-Z]", joined) or not re.search(r"[.!?][\"”)]?$", joined):
        return None
    return joined


def prose(tokenizer: Any, num_tokens: int, skip: int = 0) -> tuple[torch.Tensor, Input]:
    """Return tokens of running English prose.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Its own special tokens are used as it would: one that starts every text with BOS does so here too (SmolLM2's does not).
    num_tokens : int
        How many tokens, BOS included.
    skip : int
        Tokens of the text to leave out first, so that calibration and test texts can differ.

    Returns
    -------
    tokens : torch.LongTensor, shape (1, num_tokens)
    source : Input
        The name states the Python version, because the text differs between them; the sha256 is that of the text that the tokens
        spell.

    Raises
    ------
    ParameterError
        When a number is negative or zero, or the text is shorter.
    """
    import torch

    if num_tokens < 1 or skip < 0:
        raise ParameterError(f"num_tokens = {num_tokens} must be at least 1 and skip = {skip} at least 0")
    ids: list[int] = tokenizer(text(), add_special_tokens=False, verbose=False)["input_ids"]
    start = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else []
    wanted = num_tokens - len(start)
    if skip + wanted > len(ids):
        raise ParameterError(f"num_tokens = {num_tokens} after skip = {skip} is too many: the prose has {len(ids)} tokens")
    used = ids[skip : skip + wanted]
    sha256 = hashlib.sha256(tokenizer.decode(used).encode()).hexdigest()
    name = f"pydoc_data.topics of Python {platform.python_version()}, tokens {skip} to {skip + wanted}"
    return torch.tensor([start + used], dtype=torch.long), Input(name, sha256)
