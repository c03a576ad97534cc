"""Prose without a download: real sentences, the same each time, as many tokens as asked."""

from __future__ import annotations

import platform
import re
from typing import Any

import pytest

from wqlab.errors import ParameterError
from wqlab.models import prose
from wqlab.models.prose import text


class Words:
    """A tokenizer of words; `starts` says whether it begins a text with BOS (0)."""

    bos_token_id = 0

    def __init__(self, starts: bool = False) -> None:
        self.starts = starts
        self.words: list[str] = ["<bos>"]

    def __call__(self, content: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, Any]:
        known = {word: index for index, word in enumerate(self.words)}
        for word in content.split():
            if word not in known:
                known[word] = len(self.words)
                self.words.append(word)
        ids = [known[word] for word in content.split()]
        return {"input_ids": [0, *ids] if self.starts and add_special_tokens else ids}

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[index] for index in ids)


def test_text_is_prose() -> None:
    paragraphs = text().splitlines()
    assert len(text()) > 150_000
    assert len(paragraphs) == len(set(paragraphs))
    for paragraph in paragraphs:
        assert len(paragraph.split()) >= 12
        assert not re.search(r"::=|>>>|\*\*\*\*|----|====|\+-|  ", paragraph), paragraph


def test_tokens_are_the_same_each_time_and_skip_moves_on() -> None:
    words = Words()
    tokens, source = prose(words, 100)
    assert tuple(tokens.shape) == (1, 100)
    assert platform.python_version() in source.name
    again, same = prose(words, 100)
    assert again.equal(tokens)
    assert same == source
    later, other = prose(words, 50, skip=50)
    assert later[0].equal(tokens[0, 50:])
    assert other.sha256 != source.sha256


def test_bos_only_where_the_tokenizer_has_it() -> None:
    with_bos, _ = prose(Words(starts=True), 10)
    assert with_bos[0, 0] == 0
    assert (with_bos[0, 1:] != 0).all()
    assert tuple(with_bos.shape) == (1, 10)
    assert (prose(Words(), 10)[0] != 0).all()


def test_limits() -> None:
    with pytest.raises(ParameterError, match=r"too many: the prose has \d+ tokens"):
        prose(Words(), 10_000_000)
    for num_tokens, skip in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ParameterError, match="at least"):
            prose(Words(), num_tokens, skip)
