"""The one prompt format of the pocket VLM, for training, benchmarks and the processor alike.

``PREFIX``, the visual tokens, ``question(...)``, the answer (an option's text and ``END``); a second turn is ``follow_up(...)`` and
its answer. There is no system message: the model was trained without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Stands for a whole video in a prompt of words; the processor puts one `VIDEO_TOKEN` per visual token in its place.
VIDEO = "<video>"
#: Of SmolLM2's vocabulary (id 4): a marker for source code, the unused twin of ``<repo_name>``, and no part of the chat format.
VIDEO_TOKEN = "<reponame>"
PREFIX = "<|im_start|>user\n"
END = "<|im_end|>"
_ANSWER = f"{END}\n<|im_start|>assistant\n"

#: The same format for messages with ``{"type": "video"}`` and ``{"type": "text"}`` parts (Jinja, as transformers wants it).
CHAT_TEMPLATE = """
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\\n' -}}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- else -%}
    {%- for part in message['content'] -%}
      {%- if part['type'] == 'video' -%}
        {{- '<video>\\n' -}}
      {%- elif part['type'] == 'text' -%}
        {{- part['text'] -}}
      {%- else -%}
        {{- raise_exception('the pocket VLM reads parts of type video and text, not ' + part['type']) -}}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
""".strip()


def with_options(text: str, options: Sequence[str]) -> str:
    """Return a question and its options as one line; without options, the text as it is."""
    return f"{text} Options: {', '.join(options)}." if options else text


def question(text: str, options: Sequence[str] = ()) -> str:
    """Return what follows the visual tokens, up to where the answer begins."""
    return f"\n{with_options(text, options)}{_ANSWER}"


def follow_up(text: str, options: Sequence[str] = ()) -> str:
    """Return a second turn: what follows the first answer's ``END``, up to where the second answer begins."""
    return f"\n{PREFIX}{with_options(text, options)}{_ANSWER}"


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a piece of the prompt; nothing is put before or behind it.

    The pieces meet at special tokens or newlines, which the tokenizer never merges with what follows, so the ids of the pieces
    are the ids of the whole.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def prefix_ids(tokenizer: Any) -> list[int]:
    """Return the token ids of ``PREFIX``."""
    return encode(tokenizer, PREFIX)


def question_ids(tokenizer: Any, text: str, options: Sequence[str] = ()) -> list[int]:
    """Return the token ids of `question`."""
    return encode(tokenizer, question(text, options))


def follow_up_ids(tokenizer: Any, text: str, options: Sequence[str] = ()) -> list[int]:
    """Return the token ids of `follow_up`."""
    return encode(tokenizer, follow_up(text, options))


def answer_ids(tokenizer: Any, option: str) -> list[int]:
    """Return the token ids of an answer: the option's text and ``END``."""
    return encode(tokenizer, option + END)
