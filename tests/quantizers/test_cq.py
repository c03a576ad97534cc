"""CQ against a float64 twin, and its codebooks as a file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from wqlab.errors import DamagedFileError, NonFiniteError, ParameterError, UnsupportedError
from wqlab.hf import QuantizedKVCache
from wqlab.quantizers import artefact, create
from wqlab.quantizers.codebooks import FORMAT, KVCodebooks, learn, look_up, nearest_entries, split


def correlated(seq=300, heads=2, head_dim=16, batch=1, seed=0):
    """Keys whose neighbouring channels go together, with two outlier channels, as real ones do."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(batch, heads, seq, head_dim // 4, generator=generator)
    x = hidden.repeat_interleave(4, -1) * torch.linspace(0.5, 1.5, head_dim)
    x = x + 0.2 * torch.randn(x.shape, generator=generator)
    x[..., 3] = 8 + 2 * x[..., 3]
    return x


def books(num_bits=2, layers=1, rotary="after", x=None):
    x = correlated() if x is None else x
    size = {2: 4, 4: 2}[num_bits]
    sides = [learn(x, size), learn(x.flip(2) * 0.5, size)]
    key, value = (torch.stack([entries] * layers) for entries, _ in sides)
    counts = [torch.stack([found] * layers) for _, found in sides]
    return KVCodebooks(key, value, *counts, rotary, "a test")


def nearest_twin(x, entries):
    """Every distance in float64, one vector at a time."""
    heads, groups, _, size = entries.shape
    codes = torch.zeros(*x.shape[:3], groups, dtype=torch.uint8)
    for b in range(x.shape[0]):
        for h in range(heads):
            for t in range(x.shape[2]):
                for g in range(groups):
                    apart = entries[h, g].double() - x[b, h, t, g * size : (g + 1) * size].double()
                    codes[b, h, t, g] = int(apart.square().sum(1).argmin())
    return codes


@settings(max_examples=12, deadline=None)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 2), seq=st.integers(1, 6), groups=st.integers(1, 3), size=st.sampled_from([2, 4]),
    entries=st.integers(1, 256), dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]), seed=st.integers(0, 99),
)  # fmt: skip
def test_codes_name_the_nearest_entry(batch, heads, seq, groups, size, entries, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(batch, heads, seq, groups * size, generator=generator) * 3 + 20).to(dtype)
    known = (torch.randn(heads, groups, entries, size, generator=generator) * 3 + 20).half()
    codes = nearest_entries(x, known)
    want = nearest_twin(x, known)
    decoded, best = look_up(codes, known).double(), look_up(want, known).double()
    # Of equally near entries rounding may pick another, at the same distance.
    distance, least = (split(y - x.double(), size).square().sum(-1) for y in (decoded, best))
    torch.testing.assert_close(distance, least, rtol=1e-5, atol=1e-10)


def test_a_worked_example():
    entries = torch.tensor([[[[0.0, 0.0], [1.0, 1.0]], [[5.0, -5.0], [0.0, 1.0]]]]).half()
    x = torch.tensor([[[[0.9, 0.8, 0.1, 0.2], [0.1, 0.0, 4.0, -3.0]]]])
    codes = nearest_entries(x, entries)
    assert codes.tolist() == [[[[1, 1], [0, 0]]]]
    assert look_up(codes, entries).tolist() == [[[[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 5.0, -5.0]]]]


@pytest.mark.parametrize("num_bits", [2, 4])
def test_cq_is_below_round_to_nearest_at_equal_bits(num_bits):
    """On held-out vectors; RTN's scales come on top of its bits and CQ's codebooks on top of the model."""
    x, new = (correlated(seq, heads=1, head_dim=8, seed=seed) for seq, seed in ((2048, 0), (512, 1)))
    quantizer = create("cq", num_bits, codebooks=books(num_bits, x=x))
    rtn = create("rtn", num_bits)
    lost, lost_rtn = (float((q.dequantize(q.quantize(new)) - new).square().mean()) for q in (quantizer, rtn))
    assert lost < lost_rtn
    assert quantizer.bits_per_element(new.shape) == num_bits < rtn.bits_per_element(new.shape)


def test_weights_move_entries_to_what_costs_most():
    x = correlated(400, heads=1, head_dim=4)
    weights = torch.ones_like(x)
    weights[:, :, :40] = 1000.0
    plain, weighted = (look_up(nearest_entries(x, e), e.float()) for e in (learn(x, 4, 16)[0], learn(x, 4, 16, weights)[0]))
    first, rest = (slice(0, 40), slice(40, None))
    lost = [[float((y - x)[:, :, part].square().mean()) for part in (first, rest)] for y in (plain, weighted)]
    assert lost[1][0] < lost[0][0]
    assert lost[1][1] > lost[0][1]


def test_fewer_vectors_than_entries():
    x = correlated(5, heads=1, head_dim=4)
    entries, counts = learn(x, 4, 16)
    assert counts.sum() == 5
    torch.testing.assert_close(look_up(nearest_entries(x, entries), entries).float(), x, atol=1e-2, rtol=1e-3)


def test_seeds_decide():
    x = correlated(300, heads=1, head_dim=8)
    assert torch.equal(learn(x, 4, 32, seed=3)[0], learn(x, 4, 32, seed=3)[0])
    assert not torch.equal(learn(x, 4, 32, seed=3)[0], learn(x, 4, 32, seed=4)[0])


@pytest.mark.parametrize("num_bits", [2, 4])
def test_a_cache_holds_indices_and_nothing_else(num_bits):
    found = books(num_bits, layers=2)
    x = correlated(70).half()
    cache = QuantizedKVCache("cq", num_bits, method_options={"codebooks": found})
    for layer in range(2):
        cache.update(x, x * 0.5, layer)
    report = cache.report()
    assert report["tokens_per_width"] == {num_bits: 4 * 64, 16: 4 * 6}
    assert report["bits_per_element"] == pytest.approx((64 * num_bits + 6 * 16) / 70)
    assert report["bytes_shared"] == found.nbytes() == 2 * 2 * 2 * 16 * 256 * 2
    assert "of codebooks belong to the model" in cache.describe()
    key = cache.layers[1].segments.key
    assert key.packed.shape == (1, 2, 64, 16 * num_bits // 8)
    want = look_up(nearest_entries(x[:, :, :64], found.key[1]), found.key[1])
    assert torch.equal(key.dequantize()[:, :, :64], want)
    cache.crop(-30)
    assert torch.equal(cache.layers[1].segments.key.dequantize(), want[:, :, :40])
    with pytest.raises(ParameterError, match="layer 2 has no codebooks: 2 layers were learnt"):
        cache.update(x, x, 2)


def test_reordering_only_renames():
    found = books(2)
    again = found.reordered()
    x = correlated(64)
    for role in ("key", "value"):
        before, after = (c.of(role, 0) for c in (found, again))
        assert torch.equal(look_up(nearest_entries(x, before), before), look_up(nearest_entries(x, after), after))
        counts = getattr(again, f"{role}_counts")
        assert (counts.diff(dim=-1) <= 0).all()
        assert torch.equal(counts.sort(-1).values, getattr(found, f"{role}_counts").sort(-1).values)
        codes = nearest_entries(correlated(), after)
        if role == "key":
            assert torch.equal(torch.bincount(codes[0, 0, :, 0].long(), minlength=256), counts[0, 0, 0])


def test_a_file_keeps_all_and_shows_damage(tmp_path):
    found = books(4, rotary="before")
    path = tmp_path / "deep" / "books.safetensors"
    found.save(path)
    again = KVCodebooks.load(path)
    assert (again.rotary, again.source, str(again.spec)) == ("before", "a test", "VQ<2,256,1>")
    for name in ("key", "value", "key_counts", "value_counts"):
        assert torch.equal(getattr(again, name), getattr(found, name))
    assert [p.name for p in path.parent.iterdir()] == ["books.safetensors"]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"books.safetensors is damaged \(its checksum differs\)"):
        KVCodebooks.load(path)
    path.write_bytes(content[:-10])
    with pytest.raises(DamagedFileError, match="is damaged"):
        KVCodebooks.load(path)
    assert path.read_bytes() == content[:-10]
    save_file({"key": torch.zeros(2)}, path, metadata={"format": "other-v1"})
    with pytest.raises(DamagedFileError, match=f"has format 'other-v1', not {FORMAT}"):
        KVCodebooks.load(path)
    with pytest.raises(FileNotFoundError, match="learn it first"):
        KVCodebooks.load(tmp_path / "none.safetensors")
    artefact.write(path, {"key": found.key}, {"format": FORMAT})
    with pytest.raises(DamagedFileError, match="holds no whole codebooks"):
        KVCodebooks.load(path)
    assert load_file(path).keys() == {"key"}


def test_bad_input_is_named():
    found = books(2)
    with pytest.raises(ParameterError, match=r"cq needs codebooks of the model: learn them with wqlab.hf.learn_codebooks"):
        create("cq", 2)
    with pytest.raises(ParameterError, match=r"num_bits = 4 codes vectors of 2 channels, these codebooks are VQ<4,256,1>"):
        create("cq", 4, codebooks=found)
    quantizer = create("cq", 2, codebooks=found)
    with pytest.raises(UnsupportedError, match=r"heads, head_dim = 3, 16 does not fit codebooks of 2, 16"):
        quantizer.quantize(torch.zeros(1, 3, 4, 16))
    with pytest.raises(UnsupportedError, match="head_dim = 18 is no multiple of vector_size = 4"):
        learn(torch.zeros(1, 1, 8, 18), 4)
    with pytest.raises(NonFiniteError, match="calibration: 1 of"):
        learn(torch.zeros(1, 1, 8, 4).masked_fill(torch.arange(32).reshape(1, 1, 8, 4) == 5, torch.nan), 4)
    with pytest.raises(ParameterError, match="257 entries are more than the 256"):
        KVCodebooks(*[torch.zeros(1, 1, 1, 257, 4).half()] * 2, *[torch.zeros(1, 1, 1, 257)] * 2)
    with pytest.raises(ParameterError, match="counts without the last"):
        KVCodebooks(*[torch.zeros(1, 1, 1, 8, 4).half()] * 2, *[torch.zeros(1, 1, 1, 7)] * 2)
    with pytest.raises(ParameterError, match="rotary = 'around'"):
        KVCodebooks(found.key, found.value, found.key_counts, found.value_counts, "around")
    with pytest.raises(NonFiniteError, match="codebooks: key"):
        KVCodebooks(found.key * torch.inf, found.value, found.key_counts, found.value_counts)
