"""similarity_heatmap with a tiny random model: arithmetic against whole loops, the user's own video and prompts, and bad ones."""

import json

import av
import numpy as np
import pytest
import torch

import wqlab
from wqlab import experiments, figures
from wqlab.errors import DamagedFileError, NonFiniteError, ParameterError, UnknownNameError
from wqlab.evals import pocketbench, relevance
from wqlab.experiments import video_windows
from wqlab.experiments.similarity_heatmap import PROMPTS
from wqlab.models.pocket import prompt

SMALL = {"num_frames": 8, "num_videos": 3}


@pytest.fixture
def eyes(tiny_vlm, monkeypatch):
    """The tiny model, which sees frames of any size as 8 x 8 places."""
    see = tiny_vlm.model.get_video_features

    def pooled(frames):
        small = torch.nn.functional.adaptive_avg_pool2d(frames.flatten(0, 1).float(), 8)
        return see(small.unflatten(0, frames.shape[:2]))

    monkeypatch.setattr(tiny_vlm.model, "get_video_features", pooled)
    return tiny_vlm


@pytest.fixture
def video(tmp_path):
    """A clip of 12 frames that grow brighter."""
    path = tmp_path / "my clip.mp4"
    with av.open(path, "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width = stream.height = 64
        for i in range(12):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 20 * i, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def cosines(text, windows):
    """Eq. 8, pair by pair."""
    return [torch.nn.functional.cosine_similarity(text[:, None], window[None], dim=-1).mean().item() for window in windows]


@torch.inference_mode()
def test_rows_are_eq_8_of_each_prompt_and_window(eyes, video):
    prompts = ["What is bright?", "a dog"]
    result = wqlab.run("similarity_heatmap", video=str(video), prompts=prompts, window_size=96, **SMALL)
    clip = result.data[result.data["panel"] == "clip"]
    embed = eyes.model.get_input_embeddings()
    windows = video_windows.read(video, 8).visual.double()[: 5 * 96].reshape(5, 96, -1)
    for text, rows in clip.groupby("prompt"):
        expected = cosines(embed(torch.tensor(list(text.encode()))).double(), windows)
        np.testing.assert_allclose(rows["similarity"], expected, atol=1e-9)
    assert clip[clip["row"] == 0]["prompt"].unique().tolist() == prompts[:1]
    assert clip[clip["row"] == 0][["frame_start", "frame_stop"]].to_numpy().tolist() == [[0, 2], [1, 3], [3, 5], [4, 6], [6, 8]]
    assert clip[clip["row"] == 0]["time_s"].is_monotonic_increasing
    assert "shown" not in result.data
    assert result.evidence["similarity"].kind == "measured"
    assert [i.name for i in result.inputs if i.name.startswith("clip")] == ["clip my clip.mp4"]
    assert str(video.parent) not in json.dumps([i.name for i in result.inputs]) + figures.caption(result)


@torch.inference_mode()
def test_statistics_are_those_of_a_loop_over_questions(eyes, video):
    result = wqlab.run("similarity_heatmap", video=str(video), **SMALL)
    items = list(pocketbench.items("hard", 1001, 8, stop=3 + 10))
    embed = eyes.model.get_input_embeddings()

    def scores(text, item):
        windows = eyes.model.get_video_features(pocketbench.draw([item]))[0].double().reshape(16, 32, -1)
        return np.array(cosines(embed(torch.tensor(list(text.encode()))).double(), windows))

    expected, others = [], []
    for item in items[:3]:
        strange = [other.questions[0] for other in items[item.index + 1 :]][: 10 - len(item.questions)]
        mine, theirs = [], []
        for question in item.questions:
            hit = np.repeat(np.isin(range(8), question.frames), 2)
            if hit.all():
                continue
            mine.append(relevance.auc(scores(prompt.with_options(question.text, question.options), item), hit))
            theirs += [relevance.auc(scores(prompt.with_options(q.text, q.options), item), hit) for q in strange]
        if mine:
            expected.append(np.mean(mine))
            others.append(np.mean(theirs))
    values = {name: value.value for name, value in result.values.items()}
    assert values["auc_prompt"] == pytest.approx(np.mean(expected))
    assert values["auc_of_others_prompt"] == pytest.approx(np.mean(others))
    assert values["auc_own_minus_others_prompt"] == pytest.approx(np.mean(expected) - np.mean(others))
    assert values["auc_prompt_low"] <= values["auc_prompt"] <= values["auc_prompt_high"]
    assert values["videos"] == len(expected)
    for text in ("prompt", "question", "right_answer"):
        shares = [values[f"pocketbench_{part}_share_{text}"] for part in ("window", "prompt", "interaction")]
        assert sum(shares) == pytest.approx(1)


def test_the_example_marks_the_windows_that_answer(eyes, video):
    result = wqlab.run("similarity_heatmap", video=str(video), example=3, text="question", **SMALL)
    shown = result.data[result.data["panel"] == "pocketbench"]
    (item,) = pocketbench.items("hard", 1001, 8, start=3, stop=4)
    for (_, rows), question in zip(shown.groupby("row"), item.questions, strict=True):
        frames = rows[rows["relevant"].astype(bool)]
        assert sorted(set(frames["frame_start"])) == sorted(question.frames)
        assert rows["answer"].unique().tolist() == [question.options[question.answer]]
    assert result.evidence["relevant"].kind == "simulated"
    assert result.pictures["pocketbench"].shape[0] == 8


def test_windows_of_one_frame_are_always_judged_too(eyes, video):
    halves = wqlab.run("similarity_heatmap", video=str(video), **SMALL).values
    frames = wqlab.run("similarity_heatmap", video=str(video), window_unit="frames", window_size=1, **SMALL).values
    for name in ("auc_prompt", "auc_of_others_question", "auc_own_minus_others_right_answer"):
        assert halves[f"{name}_by_frame"] == frames[f"{name}_by_frame"] == frames[name] != halves[name]
        assert halves[f"{name}_by_frame_low"] == frames[f"{name}_low"]


def test_a_scorer_that_knows_nothing_is_at_chance_and_varies_with_nothing(eyes, video):
    result = wqlab.run("similarity_heatmap", video=str(video), scorer="uniform", **SMALL)
    values = {name: value.value for name, value in result.values.items()}
    assert values["auc_prompt"] == values["auc_of_others_question"] == 0.5
    assert values["clip_window_share"] == values["clip_prompt_share"] == values["clip_interaction_share"] == 0
    figures.draw(result)


@pytest.mark.parametrize("given", [{}, {"show": "interaction"}, {"window_unit": "frames", "window_size": 1}, {"scorer": "pearson"}])
def test_the_figure_names_its_evidence(eyes, video, given):
    result = wqlab.run("similarity_heatmap", video=str(video), prompts=["a", "b " * 60], **SMALL, **given)
    figure = figures.draw(result)
    assert len(figure.axes) == 8
    texts = [axes.get_title(loc="left") for axes in figure.axes] + [axes.get_ylabel() for axes in figure.axes]
    assert any("(simulated)" in text for text in texts)
    assert any("(measured)" in text for text in texts)
    assert any("my clip.mp4" in text for text in texts)


def test_what_was_seen_is_not_seen_again(eyes, video):
    for given in ({}, {"window_size": 64}, {"show": "interaction"}, {"example": 1}, {"prompts": ["other words"]}):
        wqlab.run("similarity_heatmap", video=str(video), **SMALL, **given)
    assert eyes.loads == 1


def test_a_new_file_under_an_old_name_is_read_again(eyes, video):
    before = wqlab.run("similarity_heatmap", video=str(video), **SMALL)
    video.write_bytes(video.read_bytes() + b"\0" * 8)
    after = wqlab.run("similarity_heatmap", video=str(video), **SMALL)
    hashes = [next(i.sha256 for i in result.inputs if i.name.startswith("clip")) for result in (before, after)]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": []}, r"prompts = \[\] is refused"),
        ({"prompts": ["a dog", "  "]}, r"prompts\.1 = '  ' is refused: a prompt has no words: write what to look for"),
        ({"prompts": ["x" * 1001]}, r"prompts\.0 .* at most 1000"),
        ({"prompts": ["a"] * 25}, "at most 24"),
        ({"prompts": "a dog"}, r"prompts = 'a dog' is refused"),
        ({"window_size": 0}, "window_size = 0"),
        ({"window_unit": "seconds"}, "window_unit = 'seconds'"),
        ({"num_frames": 7}, "num_frames = 7"),
        ({"video": ""}, "video = ''"),
        ({"seed": -1}, "seed = -1"),
    ],
)
def test_bad_parameters_are_refused(given, message):
    with pytest.raises(ParameterError, match=message):
        experiments.validate("similarity_heatmap", given)


def test_an_unknown_scorer_is_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match="did you mean cosine"):
        experiments.validate("similarity_heatmap", {"scorer": "cosin"})


def test_bad_videos_are_refused(eyes, video, tmp_path):
    def run(path, **given):
        return wqlab.run("similarity_heatmap", video=str(path), **SMALL | given)

    with pytest.raises(ParameterError, match="no such file; give the path of a video file"):
        run(tmp_path / "missing.mp4")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ParameterError, match="cannot be read as a video"):
        run(tmp_path / "text.mp4")
    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    with pytest.raises(DamagedFileError, match="cut off or damaged"):
        run(tmp_path / "cut.mp4")
    with pytest.raises(ParameterError, match=r"my clip.mp4 has 512 visual tokens \(8 frames\).*at most 256 tokens \(4 frames\)"):
        run(video, window_unit="frames", window_size=5)
    with pytest.raises(ParameterError, match=r"768 visual tokens \(12 frames\).* or take more frames of a longer video"):
        run(video, num_frames=32, window_size=400)


def test_embeddings_that_are_not_finite_are_refused(eyes, video, monkeypatch):
    see = eyes.model.get_video_features
    monkeypatch.setattr(eyes.model, "get_video_features", lambda frames: see(frames) * float("nan"))
    with pytest.raises(NonFiniteError, match="cosine"):
        wqlab.run("similarity_heatmap", video=str(video), **SMALL)


def test_our_prompts_are_ten_and_name_things_shown_and_not_shown():
    assert len(PROMPTS) == 10
    assert 0 < sum(PROMPTS.values()) < 10
    assert experiments.validate("similarity_heatmap", {}).prompts == list(PROMPTS)


def test_parts():
    experiment = experiments.get("similarity_heatmap")
    assert experiment.parts(experiments.validate("similarity_heatmap", {})) == ["smollm2", "efficientnet_lite0", "clips"]
