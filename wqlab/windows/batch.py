"""Cutting visual tokens into windows, for one video or a ragged batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from wqlab.errors import NonFiniteError, ParameterError

if TYPE_CHECKING:
    import numpy as np

WindowUnit = Literal["tokens", "frames"]
#: Embeddings of a batch: one row [L, D], padded rows [batch, L, D], or a list of rows [L_b, D].
Rows = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class WindowScores:
    """One score per window.

    Parameters
    ----------
    values : Tensor or ndarray
        [batch, windows]; NaN where a row has no such window.
    windows_per_row : tuple of int
        [batch]; row b has the first ``windows_per_row[b]`` windows.
    tail_tokens : tuple of int
        [batch]; tokens behind the last window of each row.
    window_size : int
        Tokens per window.
    scorer : str
        What scored them.
    """

    values: Tensor | np.ndarray[Any, Any]
    windows_per_row: tuple[int, ...]
    tail_tokens: tuple[int, ...]
    window_size: int
    scorer: str


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Text and windows as similarities want them, made by `window_batch`.

    Parameters
    ----------
    text : Tensor
        [batch, N, D], zero where padded.
    text_mask : Tensor or None
        bool [batch, N], True for tokens; None where all rows have N tokens.
    windows : Tensor
        [batch, windows, tokens per window, D]. Windows that a row does not have hold whatever the padding held.
    windows_per_row, tail_tokens : tuple of int
        [batch].
    """

    text: Tensor
    text_mask: Tensor | None
    windows: Tensor
    windows_per_row: tuple[int, ...]
    tail_tokens: tuple[int, ...]

    def scores(self, values: Tensor, scorer: str, check: bool = True) -> WindowScores:
        """Put NaN where a row has no window and, with `check`, refuse scores that are not finite.

        Parameters
        ----------
        values : Tensor
            [batch, windows], a score per window.
        scorer : str
            For the record and the message.
        check : bool
            True waits for the device. False leaves it to `wqlab.windows.plan`, which carries such windows along.

        Raises
        ------
        NonFiniteError
            For NaN or infinity in the embeddings of a row.
        """
        mask = valid_mask(self.windows_per_row, values.shape[1], values.device)
        if mask is not None:
            values = values.masked_fill(~mask, torch.nan)
        if check:
            finite = values.isfinite().sum(-1).tolist()
            rows = [row for row, (got, want) in enumerate(zip(finite, self.windows_per_row, strict=True)) if got != want]
            if rows:
                raise NonFiniteError(
                    f"{scorer}: embeddings of row {', '.join(map(str, rows))} hold NaN or infinity, or overflow {values.dtype}; "
                    "check the model's weights and its input"
                )
        return WindowScores(values, self.windows_per_row, self.tail_tokens, self.windows.shape[2], scorer)


def valid_mask(lengths: Sequence[int], width: int, device: torch.device) -> Tensor | None:
    """Return bool [rows, width], True in the first ``lengths[row]`` places, or None when every row is full."""
    if all(length == width for length in lengths):
        return None
    # Not torch.tensor(..., device=device): that copy waits for the device.
    limit = torch.tensor(lengths).to(device, non_blocking=True)
    return torch.arange(width, device=device) < limit[:, None]


def tokens_per_window(window_size: int, window_unit: WindowUnit = "tokens", tokens_per_frame: int | None = None) -> int:
    """Return the tokens of one window.

    Parameters
    ----------
    window_size : int
        The paper's S, at least 1: tokens, or frames when `window_unit` says so.
    window_unit : {"tokens", "frames"}
        The paper counts tokens, and S = 32 is then a fraction of a frame.
    tokens_per_frame : int, optional
        Visual tokens of one frame; needed for ``frames``.

    Raises
    ------
    ParameterError
        For a size below 1, an unknown unit, or frames without their token count.
    """
    if isinstance(window_size, bool) or not isinstance(window_size, int) or window_size < 1:
        raise ParameterError(f"window_size = {window_size!r} is refused: it must be a whole number, at least 1 (the paper uses 32)")
    if window_unit not in get_args(WindowUnit):
        raise ParameterError(f"window_unit = {window_unit!r} is refused: it must be one of {', '.join(get_args(WindowUnit))}")
    if window_unit == "tokens":
        return window_size
    if isinstance(tokens_per_frame, bool) or not isinstance(tokens_per_frame, int) or tokens_per_frame < 1:
        raise ParameterError(
            f"tokens_per_frame = {tokens_per_frame!r} is refused: window_unit = 'frames' needs the visual tokens of one frame, "
            "a whole number, at least 1"
        )
    return window_size * tokens_per_frame


def window_batch(
    text: Rows,
    visual: Rows,
    *,
    window_size: int = 32,
    window_unit: WindowUnit = "tokens",
    tokens_per_frame: int | None = None,
    text_lengths: Sequence[int] | None = None,
    visual_lengths: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> WindowBatch:
    """Bring text and visual embeddings into one batch of whole windows; never waits for the device.

    Parameters
    ----------
    text, visual : Tensor or list of Tensor
        Embeddings, any floating dtype: one row [L, D], padded rows [batch, L, D], or a list of rows [L_b, D]. A single row serves
        all rows of the other: many prompts on one video, or one prompt on many videos.
    window_size, window_unit, tokens_per_frame
        See `tokens_per_window`.
    text_lengths, visual_lengths : sequence of int, optional
        Tokens of each padded row, counted from its front; default: all. Plain numbers, because fetching them would wait.
    dtype : torch.dtype, optional
        In which to compare; default: float64 on a CPU and float32 elsewhere.

    Raises
    ------
    ParameterError
        For an empty prompt, a video shorter than one window, embeddings of different width, token ids in place of embeddings,
        lengths or batches that do not fit, and what `tokens_per_window` refuses.
    """
    span = tokens_per_window(window_size, window_unit, tokens_per_frame)
    text, num_text = _padded("text", text, text_lengths)
    visual, num_visual = _padded("visual", visual, visual_lengths)
    if text.shape[-1] != visual.shape[-1]:
        raise ParameterError(
            f"text embeddings have width {text.shape[-1]}, visual ones {visual.shape[-1]}: give the visual embeddings as they are "
            "after the projector"
        )
    if text.device != visual.device:
        raise ParameterError(f"text lies on {text.device}, visual tokens on {visual.device}: move one to the other's device")
    for row, length in enumerate(num_text):
        if length == 0:
            raise ParameterError(f"the prompt of row {row} is empty: give the embeddings of at least one text token")
    for row, length in enumerate(num_visual):
        if length == 0:
            raise ParameterError(f"row {row} has no visual tokens: give it a video, or leave its cache in full precision")
        if length < span:
            raise ParameterError(
                f"the video of row {row} is shorter than one window: it has {length} visual tokens, the window {span}; choose a "
                f"window of at most {length} tokens, give more frames, or leave its cache in full precision"
            )
    batch = max(len(num_text), len(num_visual))
    if {len(num_text), len(num_visual)} - {1, batch}:
        raise ParameterError(
            f"{len(num_text)} rows of text do not fit {len(num_visual)} rows of visual tokens: give as many, or one"
        )
    num_text, num_visual = (n * batch if len(n) == 1 else n for n in (num_text, num_visual))
    if dtype is None:
        dtype = torch.float64 if visual.device.type == "cpu" else torch.float32
    mask = valid_mask(num_text, text.shape[1], text.device)
    text = text.to(dtype).expand(batch, -1, -1)
    if mask is not None:
        text = text.masked_fill(~mask[:, :, None], 0)  # padding may hold anything, NaN too
    counts = tuple(n // span for n in num_visual)
    windows = visual[:, : max(counts) * span].to(dtype).expand(batch, -1, -1)
    return WindowBatch(
        text=text,
        text_mask=mask,
        windows=windows.reshape(batch, max(counts), span, windows.shape[-1]),
        windows_per_row=counts,
        tail_tokens=tuple(n % span for n in num_visual),
    )


def _padded(what: str, rows: Rows, lengths: Sequence[int] | None) -> tuple[Tensor, tuple[int, ...]]:
    """Return rows as [batch, L, D] and the length of each."""
    if not isinstance(rows, Tensor):
        rows = list(rows)
        if not rows or any(row.ndim != 2 or row.shape[-1] != rows[0].shape[-1] for row in rows):
            raise ParameterError(f"{what} rows {[tuple(row.shape) for row in rows]} must be at least one, each [L, D] with one D")
        if lengths is not None:
            raise ParameterError(f"{what}_lengths belong to padded rows; a list of rows has its own lengths: leave them out")
        lengths = [row.shape[0] for row in rows]
        rows = rows[0][None] if len(rows) == 1 else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    elif rows.ndim == 2:
        rows = rows[None]
    if rows.ndim != 3 or rows.shape[0] == 0 or rows.shape[2] == 0:
        raise ParameterError(f"{what} {tuple(rows.shape)} must be [L, D] or [batch, L, D] with at least one row")
    if not rows.is_floating_point():
        raise ParameterError(f"{what} has dtype {rows.dtype}: give embeddings, not token ids (model.get_input_embeddings()(ids))")
    if lengths is None:
        return rows, (rows.shape[1],) * rows.shape[0]
    lengths = tuple(int(length) for length in lengths)
    if len(lengths) != rows.shape[0] or not all(0 <= length <= rows.shape[1] for length in lengths):
        raise ParameterError(
            f"{what}_lengths {lengths} do not fit {tuple(rows.shape)}: give one per row, each 0 to {rows.shape[1]}"
        )
    return rows, lengths
