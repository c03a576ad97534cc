import numpy as np
import pytest
import torch
from launched_ops import LaunchedOps

from wqlab import registry
from wqlab.errors import NonFiniteError, ParameterError, UnknownNameError
from wqlab.windows.plan import make_plan, on_host
from wqlab.windows.scorers import create
from wqlab.windows.search import search


def prompts(scorer="cosine"):
    generator = torch.Generator().manual_seed(0)
    kind = registry.lookup("scorer", scorer)
    if kind.reads == "attention":
        layers = len(kind().layers)
        return [torch.ones(1, layers)] * 2, [torch.rand(n, layers, generator=generator) for n in (70, 100)]
    text = [torch.randn(n, 16, generator=generator) for n in (3, 7)]
    visual = [torch.randn(n, 16, generator=generator) for n in (70, 100)]
    return text, visual


def test_a_search_is_a_scorer_and_a_plan():
    text, visual = prompts()
    got = search(text, visual, [0.3, 0.6], scorer="euclidean", window_size=16, alpha=1.5, normalize="rank")
    want = make_plan(create("euclidean").score(text, visual, window_size=16), [0.3, 0.6], 1.5, "rank")
    assert torch.equal(got.bit_widths, want.bit_widths)
    assert (got.scorer, got.windows_per_row, got.tail_tokens) == ("euclidean", (4, 6), (6, 4))
    seeded = search(text, visual, [0.3, 0.6], scorer=create("random", seed=3))
    assert seeded.scorer == "random"


def test_refusals_pass_through():
    text, visual = prompts()
    with pytest.raises(UnknownNameError, match="scorer"):
        search(text, visual, [0.5], scorer="manhattan")
    with pytest.raises(ParameterError, match="calibrate"):
        search(text, visual, [0.5], num_layers=2)
    visual[0][3] = torch.inf
    with pytest.raises(NonFiniteError, match="row 0"):
        search(text, visual, [0.5])
    late = search(text, visual, [0.5], check=False)
    with pytest.raises(NonFiniteError, match="1 of 3 windows have a cosine score"):
        on_host(late)


fast_path = [
    pytest.mark.parametrize("scorer", registry.names("scorer")),
    pytest.mark.parametrize("normalize", ["none", "minmax", "rank"]),
    pytest.mark.parametrize("importance_on", ["host", "device"]),
    pytest.mark.parametrize("ragged", [False, True]),
]


def for_device(device, scorer, importance_on, ragged):
    text, visual = prompts(scorer)
    rows = slice(None) if ragged else slice(1)
    importance = np.linspace(0.1, 0.9, 5)
    given = torch.tensor(importance).to(device) if importance_on == "device" else importance
    return [t.to(device) for t in text[rows]], [v.to(device) for v in visual[rows]], given


def all_of(test):
    for mark in fast_path:
        test = mark(test)
    return test


@all_of
def test_the_fast_path_needs_no_value_on_the_host(scorer, normalize, importance_on, ragged):
    # Tensors on "meta" have shapes and no values: asking for one raises.
    text, visual, importance = for_device("meta", scorer, importance_on, ragged)
    plan = search(text, visual, importance, scorer=scorer, normalize=normalize, window_size=16, check=False)
    assert plan.bit_widths.is_meta
    assert plan.bit_widths.shape == (5, 6 if ragged else 4)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        search(text, visual, importance, scorer=scorer, normalize=normalize, window_size=16)


@pytest.mark.gpu
@all_of
def test_the_fast_path_never_waits_for_the_gpu(scorer, normalize, importance_on, ragged):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    options = {"scorer": scorer, "normalize": normalize, "window_size": 16, "dtype": torch.float32}
    want = search(*for_device("cpu", scorer, "host", ragged), **options)
    prompt = for_device("cuda", scorer, importance_on, ragged)
    search(*prompt, **options, check=False)  # libraries may wait when they are first used
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = search(*prompt, **options, check=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plan.bit_widths.is_cuda
    # float32 sums differ by their order: a score may cross a threshold, but hardly.
    assert (on_host(plan).bit_widths != want.bit_widths.numpy()).mean() < 0.05


def test_the_counter_counts_what_launches():
    x = torch.ones(2, 6, device="meta")
    with LaunchedOps() as ops:
        y = x.view(3, 4).mT.reshape(12)[:6]  # reshape has to copy
        torch.empty_like(y)
        y.fill_(2)
        torch.where(y > 1, 1, 0)  # CUDA fills one tensor for each number
        torch.ones(3).to("meta")
        torch.ones(3).sum().item()
    want = ["clone", "fill_", "gt", "scalar_tensor", "scalar_tensor", "where", "ones", "_to_copy", "ones", "sum"]
    assert ops.names == [*want, "_local_scalar_dense"]


@pytest.mark.parametrize(
    ("normalize", "dtype", "most"), [("none", torch.float32, 19), ("minmax", torch.float32, 24), ("minmax", torch.float64, 23)]
)
def test_the_search_of_one_row_launches_few_operations(normalize, dtype, most):
    # Each costs the host about 10 us, and on a GPU nothing here takes longer.
    text, visual = (torch.ones(n, 16, dtype=dtype, device="meta") for n in (32, 6400))
    with LaunchedOps() as ops:
        search(text, visual, np.linspace(0.5, 0.95, 30), normalize=normalize, dtype=dtype, check=False)
    assert len(ops.names) <= most, ops.names
