"""What holds for every registered KV quantizer; a new one is tested by being registered."""

import sys
import textwrap
from typing import Any

import pytest
import torch

from wqlab import registry
from wqlab.errors import NonFiniteError, ParameterError
from wqlab.hf.cache import QuantizedKVCache
from wqlab.hf.window_cache import WindowQuantCache
from wqlab.ops.mixed_decode import PackedTensor
from wqlab.quantizers import Quantizer, codebooks, create
from wqlab.quantizers.codebooks import KVCodebooks
from wqlab.quantizers.cq import VECTOR_SIZES

PLUGIN = """
    import torch
    from wqlab.quantizers import Quantizer, Quantized
    from wqlab.registry import register

    @register("method", "absmax_plugin")
    class AbsMax(Quantizer):
        name = "absmax_plugin"
        supported_bits = (8,)
        supported_granularities = ("window_channel",)

        def quantize(self, x):
            self.check(x)
            b, h, t, d = x.shape
            w = x.float().reshape(b, h, -1, self.spec.window_size, d)
            low = -w.abs().amax(3, keepdim=True)
            scale = (-low / 127).to(x.dtype)
            codes = torch.where(scale == 0, torch.zeros_like(w), (w - low) / scale.float().clamp_min(1e-30))
            codes = codes.round().clamp(0, 254).to(torch.uint8).reshape(x.shape)
            return Quantized(codes, scale.squeeze(3), low.squeeze(3).to(x.dtype), self.spec, x.dtype)

        def dequantize(self, q):
            s = q.spec.window_size
            return (q.codes * q.scale.repeat_interleave(s, 2) + q.minimum.repeat_interleave(s, 2)).to(q.dtype)

        def bits_per_element(self, shape, dtype=torch.float16):
            return 8 + 2 * 8 * dtype.itemsize / self.spec.window_size
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package with one new quantizer file, known to the registry for the length of a test."""
    package = tmp_path / "wq_plugins"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "absmax_plugin.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._PACKAGES, "method", list(registry._PACKAGES["method"]))
    monkeypatch.setitem(registry._ENTRIES, "method", dict(registry._ENTRIES["method"]))
    registry.add_package("method", "wq_plugins")
    yield "absmax_plugin"
    for name in [n for n in sys.modules if n.startswith("wq_plugins")]:
        del sys.modules[name]


def check_contract(method: str) -> None:
    """Assert the contract for every width and granularity that the method supports."""
    found = registry.lookup("method", method)
    assert found.name == method
    if found.target == "weight":
        return  # test_weight_contract
    assert issubclass(found, Quantizer)
    x = (torch.randn(2, 2, 64, 16, generator=torch.Generator().manual_seed(0)) * 3 + 1).half()
    for bits in found.supported_bits:
        for granularity in found.supported_granularities:
            options = needed(found, bits, x)
            for role in ("key", "value"):
                check_one_side(create(method, bits, 32, granularity, role, **options), x)
            check_in_a_cache(method, bits, granularity, x, options)
    constant = torch.full((1, 1, 32, 4), 2.0).half()
    options = needed(found, found.supported_bits[-1], constant)
    quantizer = create(method, found.supported_bits[-1], 32, found.supported_granularities[0], **options)
    torch.testing.assert_close(quantizer.dequantize(quantizer.quantize(constant)), constant, atol=0.05, rtol=0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(NonFiniteError):
            quantizer.quantize(torch.full((1, 1, 32, 4), bad))


def needed(found: type[Quantizer], bits: int, x: torch.Tensor) -> dict[str, Any]:
    """Return the options without which the method cannot be made: codebooks, learnt from the first row of `x`."""
    if not found.takes_codebooks:
        return {}
    entries, counts = codebooks.learn(x[:1], VECTOR_SIZES[bits])
    return {"codebooks": KVCodebooks(entries[None], entries[None], counts[None], counts[None])}


def check_one_side(quantizer: Quantizer, x: torch.Tensor) -> None:
    bits, before = quantizer.spec.num_bits, x.clone()
    encoded = quantizer.quantize(x)
    decoded = quantizer.dequantize(encoded)
    assert torch.equal(x, before), "the input was changed"
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    assert bool(torch.isfinite(decoded).all())
    assert encoded.codes.shape == (*x.shape[:3], quantizer.codes_per_token(x.shape[3]))
    assert int(encoded.codes.max()) < 2**quantizer.code_bits
    assert quantizer.code_bits * encoded.codes.shape[3] == bits * x.shape[3]
    step = float(x.max() - x.min()) / (2**bits - 1)
    if quantizer.relative_error is not None:
        step = 1.01 * quantizer.relative_error * float(x.abs().max())
    if quantizer.takes_codebooks:
        step = float(x.max() - x.min())  # entries are real vectors; no grid bounds the distance to the nearest
    assert 0 < float((decoded - x).abs().max()) < step
    held = encoded.scale.nbytes + encoded.minimum.nbytes
    assert quantizer.bits_per_element(x.shape, x.dtype) == pytest.approx(bits + 8 * held / x.numel())
    assert torch.equal(quantizer.quantize(x[1:]).codes, encoded.codes[1:]), "batch rows depend on each other"


def check_in_a_cache(method: str, bits: int, granularity: str, x: torch.Tensor, options: dict[str, Any]) -> None:
    cache = QuantizedKVCache(method, bits, granularity=granularity, method_options=options)
    cache.update(x, x, 0)
    cost = 0.0
    for role in ("key", "value"):
        quantizer = create(method, bits, 32, granularity, role, **options)
        decoded = quantizer.dequantize(quantizer.quantize(x))
        assert torch.equal(getattr(cache.layers[0].segments, role).dequantize(), decoded)
        cost += quantizer.bits_per_element(x.shape, x.dtype) / 2
    assert cache.report()["bits_per_element"] == pytest.approx(cost)


@pytest.mark.parametrize("method", [m for m in registry.names("method") if registry.lookup("method", m).target == "kv"])
def test_mixed_caches_take_what_they_can_read_packed_and_refuse_the_rest(method):
    found = registry.lookup("method", method)
    if found.window_grids:
        WindowQuantCache(method)
        x = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        for role in ("key", "value"):
            PackedTensor.pack(create(method, found.supported_bits[0], 32, role=role).quantize(x))
    else:
        with pytest.raises(ParameterError, match=f"method '{method}' .* use QuantizedKVCache"):
            WindowQuantCache(method)


@pytest.mark.parametrize("method", registry.names("method"))
def test_registered_methods(method):
    check_contract(method)


def test_a_dropped_file_is_found_and_meets_the_contract(plugin):
    assert plugin in registry.names("method")
    check_contract(plugin)
