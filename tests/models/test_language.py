"""Loading by name, folder or hub id; one clear error for each thing that can be wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from wqlab.errors import DamagedFileError, FetchError, ParameterError, UnknownNameError
from wqlab.models import load
from wqlab.records import sha256_file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small Llama with a tokenizer, saved as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("saved") / "little"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("a b").input_ids == [0, 1]
    return folder


def copy(saved: Path, target: Path) -> Path:
    target.mkdir()
    for path in saved.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_local_folder(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = load(str(saved), dtype="bfloat16", attn_implementation="eager")
    assert found.model.dtype == torch.bfloat16
    assert not found.model.training
    assert found.model.config._attn_implementation == "eager"
    assert found.tokenizer("b a").input_ids == [1, 0]
    assert [(i.name, i.sha256) for i in found.inputs] == [("little/model.safetensors", sha256_file(saved / "model.safetensors"))]
    assert "little" in found.note
    assert capfd.readouterr().err == ""  # no progress bar
    assert load(saved, dtype=torch.float16).model.dtype == torch.float16


@pytest.mark.parametrize("how", ["truncated", "header", "empty"])
def test_damaged_local_folder_is_left_as_it_is(saved: Path, tmp_path: Path, how: str) -> None:
    folder = copy(saved, tmp_path / "mine")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    damaged = {"truncated": whole[:-10], "header": b"\xff" * 8 + whole[8:], "empty": b""}[how]
    weights.write_bytes(damaged)
    with pytest.raises(DamagedFileError, match=r"mine/model\.safetensors is damaged"):
        load(str(folder))
    assert weights.read_bytes() == damaged


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_folder_without_a_model(saved: Path, tmp_path: Path, lost: str) -> None:
    folder = copy(saved, tmp_path / "mine")
    (folder / lost).unlink()
    with pytest.raises(ParameterError, match=r"no config\.json|no weights"):
        load(str(folder))


def test_weights_that_are_missing_are_not_made_up(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy(saved, tmp_path / "mine")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedFileError, match=r"lacks 1 weights .* model\.layers\.0\.self_attn\.k_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"no pickle"])
def test_damaged_pickle(saved: Path, tmp_path: Path, content: bytes) -> None:
    folder = copy(saved, tmp_path / "mine")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ParameterError, match="transformers cannot load"):
        load(folder)


def test_folder_of_another_kind_of_model(saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path / "mine")
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(ParameterError, match="transformers cannot load") as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_parameters(saved: Path) -> None:
    with pytest.raises(ParameterError, match="dtype = 'int4' is not one of float32"):
        load(str(saved), dtype="int4")
    with pytest.raises(ParameterError, match="no_such_attention"):
        load(str(saved), attn_implementation="no_such_attention")


@pytest.mark.parametrize("name", ["smolm2", "clips", "/no/such/folder", "a/b/c", ""])
def test_unknown_name(name: str, cache: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"known: pocket-vlm, smollm2; a local transformers folder or a hub id"):
        load(name)


def test_hub_without_network_fails_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(FetchError, match="cannot be taken from the hub") as caught:
        load("owner/name")
    assert time.monotonic() - start < 10
    assert "\n" not in str(caught.value)


def test_hub_without_such_a_repository(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    def missing(*_: object, **__: object) -> str:
        error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        Exception.__init__(error, "404")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    with pytest.raises(UnknownNameError, match="unknown model 'owner/name'"):
        load("owner/name")


def test_hub_snapshot_is_loaded(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = copy(saved, saved.parent / ("0" * 40))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    found = load("owner/name")
    assert "revision 000000000000" in found.note
    assert found.inputs[0].name == "owner/name/model.safetensors"
