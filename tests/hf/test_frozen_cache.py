"""A frozen cache gives what the growing one gives, token by token; tiny random models of the real classes."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from wqlab.cache.frozen import FrozenSegments, Steps
from wqlab.errors import ParameterError, UnsupportedError
from wqlab.hf.attention import packed_attention
from wqlab.hf.cache import cache_argument
from wqlab.hf.decode_graph import DecodeGraph
from wqlab.hf.window_cache import WindowQuantCache, windowquant
from wqlab.models.pocket import prompt
from wqlab.ops.mixed_decode import FragmentSegment, MixedKV, Segment, cuda_kernel, mixed_decode
from wqlab.types import WindowPlan

WIDTHS = [[16, 4, 2, 2], [4, 4, 2, 16], [2, 2, 2, 2]]
TOKENS = 140


@pytest.fixture(scope="module")
def qwen():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        max_position_embeddings=512,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def read(model, rows=2, mask=None, whole=True):
    """Return a cache of WIDTHS behind a prompt whose tokens 4 to 131 are visual, and each row's next token."""
    ids = torch.randint(0, 97, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    visual = torch.zeros(rows, TOKENS, dtype=torch.bool)
    visual[:, 4:132] = True
    cache = WindowQuantCache()
    cache.follow(WindowPlan(np.array(WIDTHS), 32, (4,) * rows, (0,) * rows, 2.0, "none", "given"), visual)
    with torch.no_grad(), packed_attention(model):
        positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
        end = TOKENS if whole else TOKENS - 1
        masked = None if mask is None else mask[:, :end]
        positions = None if positions is None else positions[:, :end]
        out = model(input_ids=ids[:, :end], attention_mask=masked, position_ids=positions, **cache_argument(model, cache))
    return cache, out.logits[:, -1].argmax(-1, keepdim=True)


def grow(model, cache, tokens, count, mask=None):
    """Return what the growing cache decodes: tokens and logits."""
    found, logits = [], []
    with torch.no_grad(), packed_attention(model):
        for _ in range(count):
            options = {}
            if mask is not None:
                options = {"position_ids": mask.sum(1, keepdim=True), "attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
                mask = options["attention_mask"]
            out = model(input_ids=tokens, **options, **cache_argument(model, cache))
            logits.append(out.logits[:, -1])
            tokens = logits[-1].argmax(-1, keepdim=True)
            found.append(tokens)
    return torch.cat(found, 1), torch.stack(logits, 1)


def test_it_decodes_what_the_growing_cache_decodes(qwen):
    cache, first = read(qwen)
    graph = DecodeGraph(qwen, cache.freeze(6), first)
    tokens, logits = grow(qwen, cache, first, 6)
    for i in range(6):
        assert torch.equal(graph.step(), tokens[:, i : i + 1])
        torch.testing.assert_close(graph.logits, logits[:, i], rtol=1e-4, atol=1e-5)
    assert graph.cache.get_seq_length() == cache.get_seq_length() == TOKENS + 6
    assert qwen.config._attn_implementation == "sdpa"


def test_left_padding_is_that_of_the_time_when_it_was_frozen(qwen):
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, :3] = 0
    cache, first = read(qwen, mask=mask)
    frozen = cache.freeze(4, mask)
    assert frozen.next_position.tolist() == [TOKENS, TOKENS - 3]
    graph = DecodeGraph(qwen, frozen, first)
    tokens, logits = grow(qwen, cache, first, 4, mask)
    assert torch.equal(graph.generate(4), tokens)
    torch.testing.assert_close(graph.logits, logits[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ParameterError, match="attention_mask"):
        cache.freeze(4, mask)  # it has grown since
    frozen.crop(-2)
    longer = torch.cat([mask, torch.ones(2, 3, dtype=torch.int64)], 1)
    with packed_attention(qwen), torch.no_grad(), pytest.raises(UnsupportedError, match="attention mask was given"):
        qwen(input_ids=first, attention_mask=longer, **cache_argument(qwen, frozen))


def test_a_video_model_decodes_in_it(pocket_model, pocket_processor):
    videos = [np.random.default_rng(0).integers(0, 255, (2, 16, 16, 3), dtype=np.uint8)]
    inputs = pocket_processor(text=[prompt.PREFIX + prompt.VIDEO + prompt.question("What is it?")], videos=videos)
    with windowquant(pocket_model, normalize="rank") as caches:
        first = pocket_model.generate(**inputs, max_new_tokens=1, do_sample=False)[:, -1:]
        frozen = caches[0].freeze(5)
        assert sum(bool(layer.store.kv.segments) for layer in frozen.layers) > 0
        want, _ = grow_inside(pocket_model, caches[0], first, 5)
        assert torch.equal(DecodeGraph(pocket_model, frozen, first).generate(5), want)


def grow_inside(model, cache, tokens, count):
    found = []
    with torch.no_grad():
        for _ in range(count):
            out = model(input_ids=tokens, **cache_argument(model, cache))
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(tokens)
    return torch.cat(found, 1), None


def test_no_mask_is_made_while_a_graph_is_recorded(qwen, monkeypatch):
    """transformers makes one then where it would make none else, and it would keep the length of that time."""
    cache, first = read(qwen)
    want = DecodeGraph(qwen, cache.freeze(2), first).generate(2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(DecodeGraph(qwen, cache.freeze(2), first).generate(2), want)


def test_nothing_moves_and_the_packed_windows_are_shared(qwen):
    cache, first = read(qwen)
    frozen = cache.freeze(3)
    places = [t.data_ptr() for layer in frozen.layers for t in layer.store.tensors()]
    DecodeGraph(qwen, frozen, first).generate(3)
    assert [t.data_ptr() for layer in frozen.layers for t in layer.store.tensors()] == places
    packed = {t.data_ptr() for layer in cache.layers for part in layer.segments.packed.values() for t in part.segment.tensors()}
    assert packed
    assert packed <= set(places)
    assert frozen.nbytes() > sum(t.numel() * t.element_size() for t in frozen.layers[0].store.tensors())


def test_tokens_can_be_forgotten(qwen):
    cache, first = read(qwen)
    graph = DecodeGraph(qwen, cache.freeze(4), first)
    before = graph.generate(4)
    graph.cache.crop(-4)
    graph.tokens.copy_(first)
    graph.position_ids.sub_(4)
    assert torch.equal(graph.generate(4), before)
    with pytest.raises(ParameterError, match="5 new tokens cannot be forgotten: 4 came"):
        graph.cache.crop(-5)


def test_more_tokens_than_there_is_room_for_are_refused(qwen):
    cache, first = read(qwen)
    graph = DecodeGraph(qwen, cache.freeze(2), first)
    with pytest.raises(ParameterError, match="room for 2 new tokens and holds 0, so 3 more"):
        graph.generate(3)
    graph.generate(2)
    with pytest.raises(ParameterError, match="larger max_new_tokens"):
        graph.step()
    with pytest.raises(ParameterError, match="room for 0"):
        cache.freeze(0)


def test_a_cache_without_its_prompt_cannot_be_frozen(qwen):
    with pytest.raises(ParameterError, match="unknown number"):
        WindowQuantCache().freeze(4)
    cache, _ = read(qwen, whole=False)
    with pytest.raises(ParameterError, match="139 of the prompt's 140"):
        cache.freeze(4)


def test_what_a_frozen_cache_cannot_do_is_said(qwen):
    cache, first = read(qwen)
    frozen = cache.freeze(4)
    with pytest.raises(ParameterError, match=r"tokens \[1, 1\] must be \[2, 1\]"):
        DecodeGraph(qwen, frozen, first[:1])
    with torch.no_grad(), packed_attention(qwen), pytest.raises(UnsupportedError, match="one new token"):
        qwen(input_ids=first.expand(-1, 2), **cache_argument(qwen, frozen))
    with torch.no_grad(), pytest.raises(UnsupportedError, match="did not read the frozen cache"):
        qwen(input_ids=first, **cache_argument(qwen, frozen))
    with pytest.raises(UnsupportedError, match="keeps its rows"):
        frozen.reorder_cache(torch.tensor([1, 0]))


@pytest.mark.parametrize("dense", [0, 5])
def test_segments_in_fragment_order_take_new_tokens(dense):
    """Also where nothing is dense yet. What lies in the room is never read."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 2, 3, 32 * 64), dtype=torch.uint8, generator=generator)
    meta = torch.rand((2, 2, 3, 256), generator=generator).half()
    segments = [FragmentSegment(codes, meta, 4, 32, 64)]
    if dense:
        segments.append(Segment(*torch.randn((2, 2, 2, dense, 64), generator=generator).half()))
    steps = Steps(2, 2, 3, torch.device("cpu"))
    held = FrozenSegments(MixedKV(tuple(segments)), steps, 1)
    held.key[:, :, dense:], held.value[:, :, dense:] = torch.nan, torch.nan
    new = torch.randn((2, 3, 2, 2, 64), generator=generator).half()
    query = torch.randn((2, 4, 1, 64), generator=generator).half()
    for i in range(3):
        steps.advance()
        held.write(new[0, i][:, :, None], new[1, i][:, :, None])
        tail = Segment(*(side[: i + 1].permute(1, 2, 0, 3) for side in new))
        want = mixed_decode(query, MixedKV(tuple(segments), tail))
        torch.testing.assert_close(held.attend(query), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(mixed_decode(query, held.held()), want, rtol=2e-3, atol=2e-3)
    assert steps.lengths.tolist() == [[3, 3], [dense + 3, dense + 3]]


def test_the_cuda_kernel_reads_the_length_where_it_lies():
    """Its launch is prepared, not run: what a recorded graph reads at every replay is the tensor that a step advances."""
    codes = torch.zeros((2, 2, 3, 32 * 64), dtype=torch.uint8)
    packed = FragmentSegment(codes, torch.zeros((2, 2, 3, 256)).half(), 4, 32, 64)
    steps = Steps(2, 2, 3, torch.device("cpu"))
    held = FrozenSegments(MixedKV((packed,)), steps, 1)
    query = torch.zeros((2, 4, 1, 64)).half()
    assert cuda_kernel.refusal(query, held.kv) is None
    call = cuda_kernel.prepare(query, held.kv, 1.0, 132, 227 << 10, None)
    assert call.arguments.last == steps.lengths[1].data_ptr()


def test_dense_tokens_with_lengths_are_refused():
    part = Segment(torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 4, 64), lengths=torch.tensor([2]))
    with pytest.raises(UnsupportedError, match="mask"):
        FrozenSegments(MixedKV((part,)), Steps(1, 1, 2, torch.device("cpu")), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_reads_the_length_anew(qwen):
    model = Qwen2ForCausalLM(qwen.config).cuda().half().eval()
    cache, first = WindowQuantCache(), torch.tensor([[5], [7]], device="cuda")
    ids = torch.randint(0, 97, (2, 40), device="cuda")
    with torch.no_grad(), packed_attention(model):
        model(input_ids=ids, **cache_argument(model, cache))
    graph = DecodeGraph(model, cache.freeze(8), first)
    tokens, logits = grow(model, cache, first, 8)
    for i in range(8):
        graph.step()
        torch.testing.assert_close(graph.logits, logits[:, i], rtol=1e-2, atol=1e-2)
        graph.tokens.copy_(tokens[:, i : i + 1])  # a near tie may fall either way
