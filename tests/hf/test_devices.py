"""A model whose layers lie on two GPUs: each layer's cache, plan and kernel stay where its keys are."""

import pytest
import torch
from test_adapters_families import FAMILIES
from torch.utils._pytree import tree_map

from wqlab import windowquant
from wqlab.hf.capture import decoder_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
HOW = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


def move(layer, device, back):
    """Let a decoder layer work on `device`, whatever its neighbours do."""
    layer.to(device)

    def there(x):
        return x.to(device) if torch.is_tensor(x) else x

    def before(_module, args, kwargs):
        return tree_map(there, args), {name: value if name in ("past_key_values", "cache") else tree_map(there, value)
                                       for name, value in kwargs.items()}  # fmt: skip

    def after(_module, _args, output):
        return tree_map(lambda x: x.to(back) if torch.is_tensor(x) else x, output)

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_a_model_split_over_two_devices(family):
    torch.manual_seed(0)
    case = FAMILIES[family]()
    model = case.model.eval().to("cuda:0")
    inputs = {name: value.to("cuda:0") for name, value in case.inputs.items()}
    options = {"window_size": 4, "normalize": "rank", "alpha": 8.0, "importance": [0.5] * len(decoder_layers(model))}
    with windowquant(model, **options) as caches:
        want = model.generate(**inputs, **HOW)
    assert {str(t.device) for layer in caches[0].layers for t in layer.segments.tensors()} == {"cuda:0"}
    move(decoder_layers(model)[1], "cuda:1", "cuda:0")
    with windowquant(model, **options) as caches:
        got = model.generate(**inputs, **HOW)
    found = [{str(t.device) for t in layer.segments.tensors()} for layer in caches[0].layers]
    assert found == [{"cuda:0"}, {"cuda:1"}]
    assert torch.equal(got, want)
