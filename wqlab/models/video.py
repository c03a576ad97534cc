"""Read frames of a video file: a uniform sample, each cut to a square."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wqlab.errors import DamagedFileError, ParameterError

if TYPE_CHECKING:
    import av

Frames = NDArray[np.uint8]

#: A file may hold this much less than it promises and still count as whole: some muxers round, some count dropped frames.
_TOLERANCE = 0.95
_DURATION = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")


@dataclass(frozen=True)
class Video:
    """A sample of a video's frames.

    Parameters
    ----------
    frames : uint8 ndarray [T, size, size, 3]
        RGB.
    timestamps_s : tuple of float
        When each of them is shown.
    fps : float
        Frames per second of the file; 0.0 when it does not say.
    num_available : int
        Frames of the file.
    """

    frames: Frames
    timestamps_s: tuple[float, ...]
    fps: float
    num_available: int


def sample_indices(num_available: int, num_frames: int) -> list[int]:
    """Return which frames to take: the middle one of each of `num_frames` equal parts; all of them when there are not more.

    Raises
    ------
    ParameterError
        For `num_frames` below 1.
    """
    if num_frames < 1:
        raise ParameterError(f"num_frames = {num_frames} is refused: it must be at least 1")
    count = min(num_available, num_frames)
    return [(2 * i + 1) * num_available // (2 * count) for i in range(count)]


def square(frame: Frames, size: int = 256) -> Frames:
    """Cut the centre square out of a frame [H, W, 3] and resize it to [size, size, 3] (bicubic, antialiased)."""
    height, width = frame.shape[:2]
    if height == width == size:
        return frame
    side = min(height, width)
    left, top = (width - side) / 2, (height - side) / 2
    image = Image.fromarray(frame).resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(image)


def read_video(path: Path | str, num_frames: int = 32, size: int = 256) -> Video:
    """Read a uniform sample of the frames of a local video file.

    Parameters
    ----------
    path : Path or str
        Anything that FFmpeg reads with a video stream. It is read twice: once to count, once to decode.
    num_frames : int
        Frames to take. A video with fewer gives all it has.
    size : int
        Side of the returned frames, in pixels: the short side is brought to it and the rest cut off on both ends.

    Raises
    ------
    ParameterError
        When there is no such file, it is no video, has sound only, or holds no frame.
    DamagedFileError
        When a part of the file is missing or broken; it stays as it is.
    """
    import av  # here, so that models which are given tensors work where it is not installed

    path = Path(path).expanduser()
    if not path.is_file():
        what = "a folder, not a video file" if path.is_dir() else "no such file"
        raise ParameterError(f"video {path}: {what}; give the path of a video file")
    available, fps = _count(path)
    wanted = sample_indices(available, num_frames)
    images: list[Frames] = []
    times: list[float] = []
    seen = 0
    try:
        with av.open(path) as container:
            for number, frame in enumerate(container.decode(_moving(container))):
                seen = number + 1
                if number == wanted[len(images)]:
                    if frame.is_corrupt:
                        raise _damaged(path, f"frame {number} of {available} is broken")
                    upright = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                    images.append(square(np.ascontiguousarray(upright), size))
                    times.append(float(frame.time) if frame.time is not None else (number / fps if fps else float(number)))
                    if len(images) == len(wanted):
                        break
    except av.error.FFmpegError as error:
        raise _damaged(path, f"decoding stops after frame {seen} of {available}") from error
    if not images:
        raise ParameterError(f"video {path} has a video stream without a single frame; give another file")
    if len(images) < len(wanted):
        if seen < available * _TOLERANCE:
            raise _damaged(path, f"only {seen} of {available} frames can be decoded")
        missing = len(wanted) - len(images)
        images += images[-1:] * missing
        times += times[-1:] * missing
    return Video(np.stack(images), tuple(times), fps, available)


def sample_array(frames: Any, num_frames: int = 32, size: int = 256) -> Frames:
    """Do to frames in memory what `read_video` does to a file's.

    Parameters
    ----------
    frames : uint8 array or tensor [T, H, W, 3]
        RGB.

    Returns
    -------
    uint8 ndarray [min(T, num_frames), size, size, 3]

    Raises
    ------
    ParameterError
        For another shape or dtype, or no frame.
    """
    array = np.asarray(frames)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
        raise ParameterError(
            f"video of shape {array.shape} and dtype {array.dtype} is refused: frames must be uint8 RGB, [T, height, width, 3]"
        )
    if 0 in array.shape:
        raise ParameterError(f"video of shape {array.shape} has no frame or no pixel; give at least one frame")
    return np.stack([square(np.ascontiguousarray(array[i]), size) for i in sample_indices(len(array), num_frames)])


def _count(path: Path) -> tuple[int, float]:
    """Return frames and frames per second of a file after looking at every packet, and that it ends where it says."""
    import av

    last_s, packets = 0.0, 0
    try:
        with av.open(path) as container:
            stream = _moving(container)
            if stream is None:
                what = "it has sound only" if container.streams.audio else "it has no video stream"
                raise ParameterError(f"{path} is no video: {what}; give a file with pictures that move")
            for packet in container.demux(stream):
                if packet.size:
                    packets += 1
                    if packet.pts is not None and packet.time_base is not None:
                        last_s = max(last_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            promised, promised_s = stream.frames, _seconds(stream.metadata)
            fps = float(stream.average_rate or stream.guessed_rate or 0)
    except av.error.FFmpegError as error:
        if packets:
            raise _damaged(path, f"reading stops after {packets} frames") from error
        raise _unreadable(path, error) from error
    if not packets:
        raise ParameterError(f"video {path} has a video stream without a single frame; give another file")
    if packets < promised * _TOLERANCE:
        raise _damaged(path, f"it promises {promised} frames and holds {packets}")
    if last_s < promised_s * _TOLERANCE:
        raise _damaged(path, f"it promises {promised_s:.1f} s and ends after {last_s:.1f} s")
    return packets, fps


def _moving(container: Any) -> Any:
    """Return the first stream of moving pictures, or None: no cover of a song, no text file (FFmpeg draws its letters)."""
    import av

    streams = [] if container.format.name == "tty" else container.streams.video
    return next((stream for stream in streams if not stream.disposition & av.stream.Disposition.attached_pic), None)


def _seconds(metadata: Any) -> float:
    """Return the length that Matroska notes beside each stream, 0.0 where there is none."""
    found = next((_DURATION.match(value) for key, value in metadata.items() if key.upper().startswith("DURATION")), None)
    return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3]) if found else 0.0


def _damaged(path: Path, what: str) -> DamagedFileError:
    return DamagedFileError(f"video {path} is cut off or damaged: {what}; it was left as it is: replace it with a whole copy")


def _unreadable(path: Path, error: av.error.FFmpegError) -> DamagedFileError | ParameterError:
    """Say why a file does not open. An MP4 usually ends with the table of its frames, so one that was cut off cannot be opened."""
    import av

    if isinstance(error, av.error.InvalidDataError):
        with path.open("rb") as file:
            if file.read(8)[4:] == b"ftyp":
                return _damaged(path, "the table of its frames is missing")
    reason = "the file is empty" if path.stat().st_size == 0 else error.strerror or str(error)
    return ParameterError(f"{path} cannot be read as a video ({reason}); give a video file, for example MP4 with H.264")


def stack(videos: Sequence[Frames]) -> Frames:
    """Return videos [T, size, size, 3] as one array [N, T, 3, size, size].

    Raises
    ------
    ParameterError
        When they do not have equally many frames.
    """
    lengths = sorted({len(video) for video in videos})
    if len(lengths) > 1:
        raise ParameterError(
            f"videos of one batch must have equally many frames, these have {', '.join(map(str, lengths))}; "
            f"pass num_frames={lengths[0]} or one video at a time"
        )
    return np.ascontiguousarray(np.stack(videos).transpose(0, 1, 4, 2, 3))
