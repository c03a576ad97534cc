"""SmolLM2 from the catalogue: the conversion, what it says, damage, and the original weights as another source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wqlab.errors import DamagedFileError, OutputError, ParameterError
from wqlab.models import LanguageModel, fetch, gguf_llama, hub, load, manifest, prose, smollm2


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """The real one, from the user's own cache; fetched and converted there when it is absent."""
    torch.set_num_threads(1)
    return load("smollm2")


def test_model_says_what_it_is(model: LanguageModel) -> None:
    assert "dequantized from GGUF Q4_1" in model.note
    assert "the FP16 baseline is these weights" in model.note
    assert [entry.name for entry in model.inputs] == ["smollm2/model.safetensors"]
    config = model.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.max_position_embeddings == 8192


def test_tokenizer_round_trips(model: LanguageModel) -> None:
    text = "Two windows, 3.5 µm apart:\n  “naïve” text — and 语言."
    assert model.tokenizer.decode(model.tokenizer(text).input_ids) == text
    assert model.tokenizer.chat_template
    assert model.tokenizer.eos_token == "<|im_end|>"


def test_answers(model: LanguageModel) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = model.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"  # and it stops by itself


def test_prose_is_likely(model: LanguageModel) -> None:
    tokens, _ = prose(model.tokenizer, 128)
    with torch.no_grad():
        assert model.model(tokens, labels=tokens).loss.exp() < 60


@pytest.mark.slow
def test_logits_equal_those_of_the_gguf_loader(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights agree to fp16 rounding with those that transformers itself reads from the same file."""
    from transformers import AutoModelForCausalLM, modeling_utils

    # It asks for accelerate, which places weights on devices; on one CPU nothing of it is used.
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda *_: True)
    source = fetch.file_of("smollm2", ".gguf")
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    ours = dict(model.model.named_parameters())
    for name, value in theirs.named_parameters():
        assert torch.equal(value.to(torch.float16).float(), ours[name]), name
    tokens, _ = prose(model.tokenizer, 64)
    with torch.no_grad():
        expected, found = theirs(tokens).logits, model.model(tokens).logits
    assert (expected - found).abs().max() < 0.05
    assert torch.equal(expected.argmax(-1), found.argmax(-1))


def test_split_halves_undoes_the_interleaving() -> None:
    rows = np.arange(8.0)[:, None]  # two heads of four rows, stored as 0, 2, 1, 3
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7.0])[:, None]
    assert (gguf_llama._split_halves(stored, 2) == rows).all()


def test_unknown_tensor_name() -> None:
    assert gguf_llama._name("blk.7.attn_q.weight") == "model.layers.7.self_attn.q_proj.weight"
    with pytest.raises(KeyError):
        gguf_llama._name("blk.7.attn_x.weight")


@pytest.fixture
def built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fetched GGUF and a finished folder, both fakes."""
    gguf = cache / "fake.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"gguf")
    monkeypatch.setattr(fetch, "file_of", lambda *_: gguf)
    monkeypatch.setattr(fetch, "_unpack_all", lambda *_: None)

    def convert(_: Path, target: Path, __: Any) -> None:
        (target / "model.safetensors").write_bytes(b"weights")
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    return smollm2.build()


def test_built_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "convert", None)
    assert smollm2.build() == built
    assert {path.name for path in built.iterdir()} == {"model.safetensors", "config.json", "manifest.json"}
    assert {path.name for path in built.parent.iterdir()} == {"smollm2"}


@pytest.mark.parametrize("damage", [b"WEIGHTS", b"weigh"], ids=["flipped", "truncated"])
def test_damaged_weights_are_kept_and_made_anew(built: Path, damage: bytes) -> None:
    (built / "model.safetensors").write_bytes(damage)
    with pytest.raises(DamagedFileError, match=r"kept as model\.safetensors\.damaged; run: wqlab models fetch smollm2"):
        load("smollm2")
    assert (built / "model.safetensors.damaged").read_bytes() == damage
    fetch.fetch(["smollm2"])
    assert (built / "model.safetensors").read_bytes() == b"weights"
    assert (built / "model.safetensors.damaged").read_bytes() == damage


def test_killed_conversion_leaves_nothing(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (built / "manifest.json").unlink()
    left = built.parent / ".smollm2-killed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert not smollm2.is_built()
    smollm2.build()
    assert not left.exists()
    assert not list(built.glob("*.damaged"))


def test_full_disk(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    (built / "manifest.json").unlink()
    monkeypatch.setattr(smollm2, "convert", full)
    with pytest.raises(OutputError, match=r"No space left on device.*WQLAB_CACHE"):
        smollm2.build()
    assert {path.name for path in built.parent.iterdir()} == {"smollm2"}


def _published(folder: Path, layers: int = 30) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "llama", "num_hidden_layers": {layers}, "hidden_size": 576}}')
    save_file({"w": np.zeros(3, np.float16)}, folder / "model.safetensors")
    (folder / "training_args.bin").write_bytes(b"not wanted")
    return folder


def test_hub_as_source(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = _published(tmp_path / "abcdef")
    monkeypatch.setattr(hub, "snapshot", lambda name: (origin, "abcdef0123456789"))
    fetch.fetch(["smollm2"], "hub")
    found = manifest.read(built)
    assert found is not None
    assert "as published (HuggingFaceTB/SmolLM2-135M-Instruct, revision abcdef012345)" in found.note
    assert [file.path for file in found.files] == ["config.json", "model.safetensors"]
    assert fetch.fetch(["smollm2"])["smollm2"] == built  # whole: nothing is replaced without being asked
    assert manifest.read(built) == found


def test_folder_as_source(built: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="is not SmolLM2-135M"):
        fetch.fetch(["smollm2"], str(_published(tmp_path / "other", layers=2)))
    origin = _published(tmp_path / "mine")
    fetch.fetch(["smollm2"], str(origin))
    found = manifest.read(built)
    assert found is not None
    assert found.note == "SmolLM2-135M-Instruct weights of the folder mine"
