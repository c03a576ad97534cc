"""The stem on a tiny random model with a byte tokenizer; `slow` runs it on the real one."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from wqlab import experiments, figures
from wqlab.errors import ParameterError
from wqlab.experiments import rtn_cache
from wqlab.types import Input


class ByteTokenizer:
    """One token per byte, no chat template: what a base model's tokenizer offers."""

    bos_token_id = None

    def __call__(self, text, return_tensors=None, **kwargs):
        ids = list(text.encode())
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids, skip_special_tokens=False):
        return bytes(int(i) % 256 for i in ids).decode("latin-1")


@pytest.fixture
def tiny(monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    language = SimpleNamespace(
        model=LlamaForCausalLM(config).eval(), tokenizer=ByteTokenizer(), note="random weights", inputs=[Input("tiny", "0" * 64)]
    )
    with torch.no_grad():
        for parameter in language.model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    rtn_cache._scores.cache_clear()
    rtn_cache._answers.cache_clear()
    monkeypatch.setattr(rtn_cache, "_load", lambda name: language)
    yield language
    rtn_cache._scores.cache_clear()
    rtn_cache._answers.cache_clear()


def test_the_table_and_its_figure(tiny):
    result = experiments.run("rtn_cache", num_tokens=128, new_tokens=5, window_size=16)
    data = result.data
    assert list(data["method"]) == ["FP16", "INT8", "INT4", "INT2", "INT4", "INT2"]
    assert {e.kind for e in result.evidence.values()} == {"measured"}
    assert set(data.columns) == {"method", "num_bits", "granularity", *result.evidence}
    assert list(data["bytes_per_token_held"]) == list(data["bytes_per_token_reported"])
    # 2 layers x (K, V) x 2 heads x 12 channels; a scale and a minimum of 16 bits per window of 16 and channel
    assert list(data["bits_per_element"][:4]) == [16, 8 + 2, 4 + 2, 2 + 2]
    assert data["bytes_per_token_held"].iloc[0] == 2 * 2 * 2 * 12 * 2
    assert data["first_tokens_equal"].iloc[0] == 5
    gap = (data["perplexity"] - data["perplexity"].iloc[0]).abs()
    assert 0 < gap[1] < gap[3]
    assert result.values["bytes_reduction_int4"].value == pytest.approx(16 / 6)
    assert result.values["perplexity_int2_window"].value == data["perplexity"].iloc[5]
    assert result.inputs[0].name == "tiny"
    figure = figures.draw(result)
    texts = [t.get_text() for axis in figure.axes for t in axis.texts]
    assert "INT2 / window" in texts
    assert any(
        "measured" in t.get_text() for axis in figure.axes for legend in [axis.get_legend()] if legend for t in legend.get_texts()
    )


def test_residual_and_sinks_are_counted(tiny):
    given = {"num_tokens": 128, "new_tokens": 2, "window_size": 16}
    plain = experiments.run("rtn_cache", **given).data
    kept = experiments.run("rtn_cache", **given, residual_length=16, sink_windows=1).data
    assert bool((kept["bits_per_element"][1:] > plain["bits_per_element"][1:]).all())
    assert kept["perplexity"][0] == plain["perplexity"][0]


def test_parameters_are_refused_by_name():
    for name, value in (("num_tokens", 8), ("window_size", 0), ("new_tokens", 0), ("prompt", "")):
        with pytest.raises(ParameterError, match=name):
            experiments.validate("rtn_cache", {name: value})


@pytest.mark.slow
def test_on_the_real_model():
    values = experiments.run("rtn_cache", quick=True).values
    assert values["perplexity_fp16"].value < values["perplexity_int4"].value < values["perplexity_int2"].value
    assert values["perplexity_int8"].value == pytest.approx(values["perplexity_fp16"].value, rel=0.01)
