"""The trained part on disk, what is wrong with it, and the whole model from the real parts. Its weights are random here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from wqlab import models
from wqlab.errors import DamagedFileError, MissingPartError, ParameterError, WqlabError
from wqlab.models import listing, pocket, shipped
from wqlab.models.pocket import lora, prompt
from wqlab.models.pocket.adapter_file import projector_of, read_adapter, write_adapter
from wqlab.models.pocket.loading import assemble
from wqlab.models.pocket.projector import PocketProjector
from wqlab.models.pocket.vision import EfficientNetLite0
from wqlab.records import sha256_file


def randomise(language_model: Any, std: float) -> None:
    torch.manual_seed(0)
    for name, parameter in language_model.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=std)


@pytest.fixture
def tiny(tiny_llama: Any, tmp_path: Path) -> tuple[Path, PocketProjector, Any]:
    """A trained part of a tiny Llama: its path, its projector, and the Llama with adapters."""
    lora.inject(tiny_llama, rank=4, scale=0.5)
    randomise(tiny_llama, 0.1)
    projector = PocketProjector(hidden=16, out=64)
    path = tmp_path / "pocket-vlm.safetensors"
    write_adapter(path, projector, tiny_llama, {"steps": 7})
    return path, projector, tiny_llama


def test_what_is_written_is_read(tiny: tuple[Path, PocketProjector, Any]) -> None:
    path, projector, llama = tiny
    part = read_adapter(path)
    assert part.sha256 == sha256_file(path) == shipped.verify(path)
    assert (part.meta["steps"], part.meta["rank"], part.meta["scale"], part.meta["hidden"], part.meta["out"]) == (7, 4, 0.5, 16, 64)
    assert part.lora.keys() == lora.lora_state(llama).keys()
    for name, value in lora.lora_state(llama).items():
        assert torch.equal(part.lora[name], value.half())
    for name, value in projector_of(part).state_dict().items():
        assert torch.equal(value, projector.state_dict()[name].half().float())
    names = load_file(path).keys()
    assert {"projector.inner.weight", "lora.layers.0.self_attn.q_proj.a", "lora.layers.2.mlp.down_proj.b"} <= names
    sidecar = json.loads(path.with_suffix(".json").read_text())
    assert (sidecar["sha256"], sidecar["num_bytes"], sidecar["steps"]) == (part.sha256, path.stat().st_size, 7)
    assert sorted(p.name for p in path.parent.iterdir()) == ["pocket-vlm.json", "pocket-vlm.safetensors"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def lose_the_checksum(path: Path) -> None:
    path.with_suffix(".json").unlink()


def garble_the_checksum(path: Path) -> None:
    path.with_suffix(".json").write_text("[1")


@pytest.mark.parametrize("break_it", [flip_a_bit, cut, lose_the_checksum, garble_the_checksum])
def test_a_damaged_file_says_how_to_restore_it(tiny: tuple[Path, PocketProjector, Any], break_it: Callable[[Path], None]) -> None:
    path = tiny[0]
    break_it(path)
    before = path.read_bytes()
    with pytest.raises(
        DamagedFileError, match=r"is damaged: its sha256 is \w{12}\.\.\., pocket-vlm\.json .*git checkout -- data/"
    ) as e:
        pocket.load(path.parent)
    assert "\n" not in str(e.value)
    assert path.read_bytes() == before


def resign(path: Path) -> None:
    path.with_suffix(".json").write_text(json.dumps({"sha256": sha256_file(path)}))


def test_a_whole_file_of_something_else(tiny: tuple[Path, PocketProjector, Any]) -> None:
    path = tiny[0]
    for meta, said in (
        (None, "is no trained part of a pocket VLM"),
        ({"wqlab": "{}"}, "does not fit this version of the pocket VLM"),
        ({"wqlab": json.dumps({"features": [640, 448, 320], "hidden": 17, "out": 64})}, "does not fit this version"),
    ):
        save_file({"projector.inner.bias": torch.zeros(3)}, path, metadata=meta)
        resign(path)
        with pytest.raises(DamagedFileError, match=f"{said}.*; make it with: wqlab models train-pocket"):
            pocket.load(path.parent)
    path.write_bytes(b"no safetensors")
    resign(path)
    with pytest.raises(DamagedFileError, match="is no trained part"):
        read_adapter(path)


def test_a_trained_part_of_another_language_model(tiny: tuple[Path, PocketProjector, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DamagedFileError, match=r"was not trained for SmolLM2-135M .*train-pocket"):
        pocket.load(tiny[0].parent)


def test_no_file_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "folder", lambda name=shipped.POCKET_VLM: tmp_path)
    for call in (pocket.load, lambda: models.load("pocket-vlm")):
        with pytest.raises(MissingPartError, match=r"pocket-vlm\.safetensors is not in .*or train it: wqlab models train-pocket"):
            call()
    row = next(row for row in listing.status() if row["name"] == "pocket-vlm")
    assert (row["fetched"], row["bytes"], row["source"], row["get"]) == (False, 0, None, "wqlab models train-pocket")


def test_listing_shows_a_shipped_model(tiny: tuple[Path, PocketProjector, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny[0]
    monkeypatch.setattr(shipped, "folder", lambda name=shipped.POCKET_VLM: path.parent)
    row = next(row for row in listing.status() if row["name"] == "pocket-vlm")
    assert (row["fetched"], row["bytes"], row["source"]) == (True, path.stat().st_size, "shipped with wqlab")
    assert {*row} == {*listing.status()[0]}
    cut(path)
    assert not next(row for row in listing.status() if row["name"] == "pocket-vlm")["fetched"]


def test_assembling_copies_nothing(tiny_llama: Any) -> None:
    vision, projector = EfficientNetLite0(), PocketProjector(hidden=16, out=64)
    model = assemble(tiny_llama.to(torch.bfloat16), vision, projector)
    assert model.dtype == torch.bfloat16
    assert (model.model.language_model, model.model.vision_tower) == (tiny_llama.model, vision)
    assert {p.device.type for p in model.parameters()} == {b.device.type for b in model.buffers()} == {"cpu"}
    assert projector.inner.weight.dtype == torch.bfloat16
    assert vision.stem.weight.dtype == torch.float32
    assert model.generation_config is tiny_llama.generation_config


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A random trained part for the real SmolLM2; the logits of that model with its adapters beside the weights, and the ids."""
    torch.set_num_threads(2)
    path = tmp_path_factory.mktemp("real") / "pocket-vlm.safetensors"
    base = models.load("smollm2")
    lora.inject(base.model)
    randomise(base.model, 0.02)
    projector = PocketProjector()
    write_adapter(path, projector, base.model, {})
    ids = torch.tensor([prompt.prefix_ids(base.tokenizer) + prompt.question_ids(base.tokenizer, "Which one?", ["red", "blue"])])
    with torch.no_grad():
        return path, base.model(ids).logits, ids


def test_the_whole_model(real: tuple[Path, torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    path, expected, ids = real
    assert path.stat().st_size < 16e6
    monkeypatch.setattr(shipped, "folder", lambda name=shipped.POCKET_VLM: path.parent)
    vlm = models.load("pocket-vlm")
    assert isinstance(vlm, pocket.LoadedVLM)
    assert vlm.name == "pocket-vlm"
    assert "dequantized from GGUF Q4_1" in vlm.note
    assert [entry.name for entry in vlm.inputs] == [
        "smollm2/model.safetensors", "efficientnet_lite0/efficientnet-lite0-57934424.pth", "pocket-vlm/pocket-vlm.safetensors",
    ]  # fmt: skip
    assert vlm.inputs[-1].sha256 == sha256_file(path)
    with torch.no_grad():
        torch.testing.assert_close(vlm.model(ids).logits, expected, atol=2e-2, rtol=1e-2)  # the file holds float16
    frames = torch.randint(0, 256, (2, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    inputs = vlm.processor(text=prompt.PREFIX + prompt.VIDEO + prompt.question("Which?", ["a", "b"]), videos=frames)
    visual = vlm.model.get_video_features(inputs["pixel_values_videos"])
    text = vlm.model.get_input_embeddings().weight
    assert float(visual.detach().std()) == pytest.approx(float(text.detach().std()), rel=0.1)
    out = vlm.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert out.shape[1] > inputs["input_ids"].shape[1]
    assert not any(parameter.requires_grad for parameter in vlm.model.model.vision_tower.parameters())


def test_settings_that_cannot_be(real: tuple[Path, torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(ParameterError, match="dtype = 'int4' is not one of float32, float16, bfloat16"):
        pocket.load(real[0].parent, dtype="int4")
    with pytest.raises(WqlabError, match="nonsense"):
        pocket.load(real[0].parent, attn_implementation="nonsense")
