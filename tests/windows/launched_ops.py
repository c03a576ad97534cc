"""Which operations of torch launch work: what bounds a fast path on a GPU whose kernels are shorter than their launch."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class LaunchedOps(TorchDispatchMode):
    """Within it, `names` collects the aten operations that compute or copy, in order; views and allocations launch nothing.

    A copy between host and device counts, and so does one that fetches a value. Tensors on "meta" meet the operations that CUDA
    tensors meet, without the device.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given, made = (
            {leaf.untyped_storage()._cdata for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
            for tree in ((args, kwargs), out)
        )
        is_view = bool(made) and made <= given and not func._schema.is_mutable
        name = func.overloadpacket.__name__
        if not is_view and name not in ALLOCATIONS:
            self.names.append(name)
        return out
