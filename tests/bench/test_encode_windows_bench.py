import pytest
import torch

from wqlab import bench, quantizers, records
from wqlab.bench import encode_windows
from wqlab.bench.encode_windows import PROMPTS, EncodeWindowsBench, Prompt, torch_encode, traffic
from wqlab.errors import MissingPartError
from wqlab.layouts import bitpack
from wqlab.ops.mixed_decode import encoder
from wqlab.profile import environment


def test_a_quick_record_has_a_row_per_mix(tmp_path):
    bench.run("encode_windows", tmp_path, quick=True)
    data = records.read("encode_windows", environment.gpu_key(), tmp_path).data
    assert list(data["mix"]) == list(encode_windows.MIXES)
    assert data["equal"].all()
    assert data["note"].isna().all()
    assert (data[["latency_us", "torch_us", "read_fraction", "ratio"]] > 0).all(axis=None)
    assert (data["traffic_fraction"] > data["read_fraction"]).all()
    assert (data["baseline"] == "torch").all()
    assert [h.metric for h in EncodeWindowsBench().headlines(data)] == ["encode a layer of 2 x 320 tokens, 2 heads, 10/30/60"]


def test_without_a_gpu_only_a_quick_run_is_made(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingPartError, match="--quick"):
        EncodeWindowsBench().measure()


@pytest.mark.parametrize("mix", encode_windows.MIXES)
def test_bytes_are_those_of_the_tensors(mix):
    prompt = Prompt(2, 2, 640, 64)
    case = encode_windows._Case(prompt, mix, torch.device("cpu"))
    key, value = case.tokens[0]
    made = [encoder.encode_windows(key, value, positions, bits) for bits, positions in case.positions]
    positions = sum(4 * p.numel() for _, p in case.positions)
    encoded = sum(p.shape[1] for _, p in case.positions)
    read, written = traffic(prompt, mix)
    assert written == sum(x.codes.numel() + 2 * x.meta.numel() for x in made)
    assert read == positions + 2 * (key.numel() + value.numel()) * encoded // prompt.seq_len
    used = torch.cat([p for _, p in case.positions], dim=1)
    assert all(len(set(row)) == encoded for row in used.tolist())


def test_the_shapes_are_whole_windows():
    assert all(sum(encode_windows.split_tokens(p.seq_len, mix)) == p.seq_len for p in PROMPTS for mix in encode_windows.MIXES)


@pytest.mark.parametrize("num_bits", [2, 4])
def test_the_baseline_does_the_same_work(num_bits):
    torch.manual_seed(0)
    key, value = (torch.randn(2, 2, 160, 64).half() for _ in range(2))
    value[0, 0, :, 5] = 3.0  # a constant channel
    at = torch.stack([torch.randperm(5), torch.randperm(5)])[:, :, None] * 32 + torch.arange(32)
    at = at.flatten(1).int()[:, :96]
    made = torch_encode(key, value, at, num_bits)
    for x, (packed, scale, low) in zip((key, value), (made[:3], made[3:]), strict=True):
        codes = bitpack.unpack(packed, num_bits, 64).reshape(2, 2, 3, 32, 64)
        decoded = (codes * scale.float().unsqueeze(3) + low.float().unsqueeze(3)).reshape(2, 2, 96, 64)
        chosen = x.gather(2, at.long()[:, None, :, None].expand(-1, 2, -1, 64))
        want = quantizers.create("rtn", num_bits, 32).quantize(chosen)
        assert torch.equal(low, want.minimum)
        torch.testing.assert_close(scale, want.scale, rtol=1e-3, atol=0)
        assert ((decoded - chosen.float()).abs() <= 0.51 * want.scale.float().repeat_interleave(32, 2) + 1e-3).all()


def test_wrong_codes_have_no_time(monkeypatch):
    def broken(self, key, value, positions, bits):
        made = encoder.encode_windows(key, value, positions, bits)
        made.codes[0, 0, 0, 0] ^= 1
        return (lambda: None), (lambda: made)

    monkeypatch.setattr(encode_windows._Case, "_launch", broken)
    data = EncodeWindowsBench().measure(quick=True)
    assert data["latency_us"].isna().all()
    assert data["note"].str.contains("wrong").all()
