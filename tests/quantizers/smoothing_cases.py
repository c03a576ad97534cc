"""What holds for SmoothQuant and QoQ: the error bound with their factors, with and without a calibration."""

import torch
from tiny_generation import rounding

from wqlab.quantizers.calibration import Calibration


def made_up_calibration(layers=2, heads=2, head_dim=32):
    generator = torch.Generator().manual_seed(3)
    key_low, key_high, value_low, value_high, query = torch.rand(5, layers, heads, head_dim, generator=generator) * 4 + 0.1
    return Calibration(-key_low, key_high, -value_low, value_high, query)


def check_bound(quantizer, x):
    """Assert the documented bound of every element of `x` [batch, heads, seq, head_dim], in float64."""
    encoded = quantizer.quantize(x)
    y = quantizer.dequantize(encoded)
    batch, _, seq, _ = x.shape
    factors = quantizer.factors(x)
    if factors is None:
        spread = torch.ones(1)
    elif quantizer.calibration is None:
        spread = factors.double().repeat_interleave(quantizer.spec.window_size, 2)
    else:
        spread = factors.double()
    stored = encoded.scale[..., : quantizer.spec.window_size] if quantizer._stores_factors else encoded.scale
    scale = stored.reshape(batch, -1, seq, 1).double()
    z = (x.double() / spread).to(x.dtype)
    one_step = scale * 1.001 + rounding(z)  # the decoded z lies within a step of z
    info = torch.finfo(x.dtype)
    around = torch.clamp((z.double().abs() + one_step) * info.eps, min=info.smallest_normal * info.eps) / 2 * (1 + 2**-12)
    smoothing = 0 if factors is None else spread * (around + rounding(z)) + rounding(y)
    bound = spread * scale / 2 * (1 + 2**-13) + (rounding(y) if factors is None else smoothing)
    assert bool(((x.double() - y.double()).abs() <= bound).all())
    counted = 8 * (encoded.scale.nbytes + encoded.minimum.nbytes) / x.numel()
    assert abs(quantizer.bits_per_element(x.shape, x.dtype) - quantizer.spec.num_bits - counted) < 1e-9
    return encoded


def outliers(dtype, seed=0, shape=(2, 2, 64, 32)):
    """Numbers like keys: a few channels are much larger than the rest."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] *= 30
    x[..., 17] = x[..., 17] * 5 + 40
    return x.to(dtype)
