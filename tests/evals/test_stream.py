"""Scores from a filled cache against plain forward passes without any cache."""

from types import SimpleNamespace

import pytest
import torch

from wqlab import registry
from wqlab.evals import pocketbench
from wqlab.evals.scoring.settings import Setting
from wqlab.evals.scoring.stream import Stream, float32_head
from wqlab.models.pocket import prompt

FRAMES = pocketbench.MIN_FRAMES


def known(start, stop):
    """What a method without a calibration asks of a batch."""
    return SimpleNamespace(start=start, stop=stop, storage=None, facts=SimpleNamespace(calibration=None))


@pytest.fixture(scope="module")
def items():
    return list(pocketbench.items("easy", 0, FRAMES, stop=3))


def one_pass(loaded, video, before, option):
    """Log-probability of `option` behind video and text, by one forward pass over everything."""
    embed = loaded.model.get_input_embeddings()
    prefix = prompt.prefix_ids(loaded.tokenizer)
    text = embed(torch.tensor([before + option[:-1]]))
    embeddings = torch.cat([embed(torch.tensor([prefix])), video[None], text], 1)
    logits = loaded.model(inputs_embeds=embeddings, use_cache=False).logits[0, -len(option) :].double()
    return float(logits.log_softmax(-1)[torch.arange(len(option)), torch.tensor(option)].sum())


def prefilled(loaded, items):
    embed = loaded.model.get_input_embeddings()
    video = loaded.model.get_video_features(pocketbench.draw(items))
    prefix = embed(torch.tensor([prompt.prefix_ids(loaded.tokenizer)])).expand(len(items), -1, -1)
    return video, prefix.shape[1], Stream.prefill(loaded.model, torch.cat([prefix, video], 1))


@pytest.mark.parametrize("name", registry.names("protocol"))
@torch.no_grad()
def test_full_precision_is_the_plain_forward_pass(loaded, items, name):
    protocol = registry.lookup("protocol", name)()
    turns = [protocol.turn(loaded.tokenizer, item.questions) for item in items]
    options = [[prompt.answer_ids(loaded.tokenizer, text) for text in turn.question.options] for turn in turns]
    assert len({len(turn.prefilled + turn.asked) for turn in turns}) > 1, "texts of one length prove nothing about padding"
    video, _, stream = prefilled(loaded, items)
    stream.read([turn.prefilled for turn in turns])
    found = stream.moved_to(Setting().cache(known(0, 0))).score([turn.asked for turn in turns], options)
    expected = [
        [one_pass(loaded, video[row], turn.prefilled + turn.asked, option) for option in options[row]]
        for row, turn in enumerate(turns)
    ]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_quantized_cache_is_read_as_plain_attention_reads_its_decoded_values(loaded, items):
    video, start, stream = prefilled(loaded, items)
    asked = [prompt.question_ids(loaded.tokenizer, item.questions[0].text) for item in items]
    quantized = stream.moved_to(Setting("rtn", 2).cache(known(start, start + video.shape[1])))
    twin = Setting().cache(known(0, 0))
    for index, layer in enumerate(quantized.cache.layers):
        twin.update(layer.segments.key.dequantize(), layer.segments.value.dequantize(), index)
    same = Stream(loaded.model, twin, stream.branch, stream.positions, stream.lengths, stream.last).read(asked)
    seen = quantized.read(asked)
    torch.testing.assert_close(seen, same, atol=1e-5, rtol=0)
    assert float((seen - stream.read(asked)).abs().max()) > 1e-2


@torch.no_grad()
def test_reading_in_pieces_is_reading_at_once(loaded, items):
    _, _, stream = prefilled(loaded, items)
    asked = [prompt.question_ids(loaded.tokenizer, item.questions[0].text) for item in items]
    again = stream.moved_to(Setting().cache(known(0, 0)))
    at_once = stream.read(asked)
    again.read([text[:3] for text in asked])
    torch.testing.assert_close(again.read([text[3:] for text in asked]), at_once, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again.read([[]] * len(items)), at_once, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_logits_of_a_bfloat16_model_are_float32(tiny_llama):
    model = tiny_llama.to(torch.bfloat16)
    ids = torch.arange(3, 40)[None]
    plain = model(ids).logits
    with float32_head(model):
        fine = model(ids).logits
    assert (plain.dtype, fine.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(fine, plain.float(), atol=0.02, rtol=0.01)
    assert len(fine.unique()) > len(plain.unique())
    assert torch.equal(model(ids).logits, plain), "the head is as it was"
