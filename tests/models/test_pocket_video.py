"""Reading video files: what is taken, and the whole kind of files that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqlab.errors import DamagedFileError, ParameterError, WqlabError
from wqlab.models import clip_path
from wqlab.models.video import read_video, sample_array, sample_indices, square, stack


def gray(count: int, height: int = 48, width: int = 64, noise: int = 0) -> np.ndarray[Any, Any]:
    """Frame i is gray of level 4 i; noise makes packets large, so that a cut file loses many."""
    frames = np.repeat((np.arange(count, dtype=np.uint8) * 4)[:, None, None, None], height, 1).repeat(width, 2).repeat(3, 3)
    return frames + np.random.default_rng(0).integers(0, noise + 1, frames.shape, dtype=np.uint8)


def write(
    path: Path, frames: np.ndarray[Any, Any] | None, fps: int = 10, options: dict[str, str] | None = None, sound: int = 0
) -> Path:
    """Write frames [T, H, W, 3] (None: no video stream) and `sound` packets of silence."""
    with av.open(str(path), "w", options=options or {}) as container:
        if frames is not None:
            video = container.add_stream("mpeg4", rate=fps)
            video.width, video.height, video.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
            video.bit_rate = 8_000_000
        if sound:
            audio = container.add_stream("pcm_s16le", rate=16000)
            container.mux([*audio.encode(silence(sound)), *audio.encode()])
        container.start_encoding()
        if frames is not None:
            for frame in frames:
                container.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(video.encode())
    return path


def silence(packets: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 1600 * packets), np.int16), format="s16", layout="mono")
    frame.sample_rate = 16000
    return frame


def cut(path: Path, share: float) -> Path:
    """Keep the first part of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


@given(available=st.integers(1, 5000), wanted=st.integers(1, 300))
def test_samples_are_even(available: int, wanted: int) -> None:
    indices = sample_indices(available, wanted)
    assert len(indices) == min(available, wanted)
    assert indices == sorted(set(indices))
    assert 0 <= indices[0] <= available - 1 - indices[-1] + 1
    assert indices[-1] < available
    if wanted >= available:
        assert indices == list(range(available))
    else:
        steps = np.diff(indices)
        assert steps.max(initial=0) - steps.min(initial=available) <= 1


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_frames_and_times_are_the_files(tmp_path: Path, name: str) -> None:
    video = read_video(write(tmp_path / name, gray(40)), 8, size=32)
    assert video.frames.shape == (8, 32, 32, 3)
    assert video.frames.dtype == np.uint8
    assert (video.num_available, video.fps) == (40, 10.0)
    expected = sample_indices(40, 8)
    np.testing.assert_allclose(video.frames.mean((1, 2, 3)), [4 * i for i in expected], atol=2.5)
    np.testing.assert_allclose(video.timestamps_s, [i / 10 for i in expected], atol=1e-3)


def test_a_short_video_gives_all_it_has(tmp_path: Path) -> None:
    assert read_video(write(tmp_path / "a.mp4", gray(5)), 32, size=32).frames.shape == (5, 32, 32, 3)
    with pytest.raises(ParameterError, match="num_frames = 0 is refused: it must be at least 1"):
        read_video(tmp_path / "a.mp4", 0)


def test_a_real_clip() -> None:
    video = read_video(clip_path("bikes"), 4)
    assert video.frames.shape == (4, 256, 256, 3)
    assert video.num_available == 250
    assert video.frames.std() > 20


def test_the_centre_square_is_kept() -> None:
    frame = np.zeros((40, 100, 3), np.uint8)
    frame[:, 30:70] = 200
    assert square(frame, 40).min() == 200
    assert square(np.ascontiguousarray(frame.transpose(1, 0, 2)), 40).min() == 200
    assert square(frame, 20).shape == (20, 20, 3)
    same = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert np.array_equal(square(same, 3), same)


def test_a_telephones_video_stands_upright(tmp_path: Path) -> None:
    """The display matrix says a quarter turn; players turn the picture, and so do we."""
    frames = np.zeros((6, 64, 64, 3), np.uint8)
    frames[:, :, :32] = 255  # left half white
    path = write(tmp_path / "a.mp4", frames)
    content = path.read_bytes()
    one, zero, w = (1 << 16).to_bytes(4, "big"), bytes(4), (1 << 30).to_bytes(4, "big")
    minus = (-(1 << 16)).to_bytes(4, "big", signed=True)
    straight, turned = [one, zero, zero, zero, one, zero, zero, zero, w], [zero, one, zero, minus, zero, zero, zero, zero, w]
    start = content.index(b"".join(straight), content.index(b"tkhd"))
    path.write_bytes(content[:start] + b"".join(turned) + content[start + 36 :])
    upright = read_video(path, 1, size=64).frames[0]
    assert upright[:24].mean() > 240  # clockwise: what was left is on top
    assert upright[40:].mean() < 15


@pytest.mark.parametrize(
    ("name", "options", "share", "said"),
    [
        ("end.mp4", {}, 0.5, "the table of its frames is missing"),
        ("start.mp4", {"movflags": "faststart"}, 0.5, r"it promises 40 frames and holds \d+"),
        ("a.mkv", {}, 0.5, r"it promises 4.0 s and ends after [\d.]+ s"),
        ("a.avi", {}, 0.5, r"it promises 40 frames and holds \d+"),
    ],
)
def test_a_truncated_file(tmp_path: Path, name: str, options: dict[str, str], share: float, said: str) -> None:
    path = cut(write(tmp_path / name, gray(40, noise=60), options=options), share)
    before = path.read_bytes()
    with pytest.raises(DamagedFileError, match=rf"{name} is cut off or damaged: {said}; .*replace it with a whole copy"):
        read_video(path, 8)
    assert path.read_bytes() == before


def test_broken_bytes_inside_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.mp4", gray(40, noise=60), options={"movflags": "faststart"})
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) * 3 // 4] = bytes(len(content) * 3 // 4 - len(content) // 2)
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"a\.mp4 is cut off or damaged"):
        read_video(path, 40)


def make_none(path: Path) -> Path:
    return path / "none.mp4"


def make_folder(path: Path) -> Path:
    return path


def make_empty(path: Path) -> Path:
    (path / "empty.mp4").touch()
    return path / "empty.mp4"


def make_text(path: Path) -> Path:
    (path / "notes.txt").write_text("no video at all\n" * 400)
    return path / "notes.txt"


def make_renamed_text(path: Path) -> Path:
    (path / "notes.mp4").write_text("no video at all\n" * 400)
    return path / "notes.mp4"


def make_sound(path: Path) -> Path:
    return write(path / "sound.wav", None, sound=4)


def make_cover(path: Path) -> Path:
    """A song whose cover is a video stream of one picture, as far as FFmpeg is concerned."""
    with av.open(str(path / "song.flac"), "w") as container:
        audio, cover = container.add_stream("flac", rate=16000), container.add_stream("png", rate=1)
        cover.width, cover.height, cover.pix_fmt = 32, 32, "rgb24"
        cover.disposition = av.stream.Disposition.attached_pic.value
        container.mux(cover.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux([*audio.encode(silence(1)), *audio.encode()])
    return path / "song.flac"


def make_zero_frames(path: Path) -> Path:
    return write(path / "zero.avi", gray(0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_none, "none.mp4: no such file; give the path of a video file"),
        (make_folder, "a folder, not a video file; give the path of a video file"),
        (make_empty, r"empty\.mp4 cannot be read as a video \(the file is empty\); give a video file"),
        (make_text, r"notes\.txt is no video: it has no video stream; give"),
        (
            make_renamed_text,
            r"notes\.mp4 cannot be read as a video \(Invalid data found when processing input\); give a video file",
        ),
        (make_sound, r"sound\.wav is no video: it has sound only; give"),
        (make_cover, r"song\.flac is no video: it has sound only; give"),
        (make_zero_frames, r"zero\.avi has a video stream without a single frame; give another file"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_no_video(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said) as caught:
        read_video(make(tmp_path))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, WqlabError)


@given(st.binary(max_size=400))
def test_any_bytes_give_one_readable_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.mp4"
    for start in (b"", b"\x00\x00\x00\x20ftypisom", b"\x1a\x45\xdf\xa3", b"RIFF"):
        path.write_bytes(start + content)
        with pytest.raises(WqlabError, match=r"a\.mp4"):
            read_video(path, 4)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (np.zeros((4, 8, 8, 3)), r"shape \(4, 8, 8, 3\) and dtype float64 is refused: frames must be uint8 RGB"),
        (np.zeros((4, 3, 8, 8), np.uint8), r"shape \(4, 3, 8, 8\) and dtype uint8 is refused"),
        (np.zeros((8, 8, 3), np.uint8), r"shape \(8, 8, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), "has no frame or no pixel; give at least one frame"),
        (np.zeros((2, 0, 8, 3), np.uint8), "has no frame or no pixel"),
    ],
)
def test_arrays_that_are_no_video(frames: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        sample_array(frames)


def test_arrays_are_sampled_like_files() -> None:
    assert np.array_equal(sample_array(gray(40), 8, 16)[:, 0, 0, 0], [4 * i for i in sample_indices(40, 8)])


def test_a_batch_needs_one_length() -> None:
    assert stack([gray(4, 8, 8)] * 2).shape == (2, 4, 3, 8, 8)
    with pytest.raises(ParameterError, match="equally many frames, these have 4, 6; pass num_frames=4 or one video at a time"):
        stack([gray(4, 8, 8), gray(6, 8, 8)])
