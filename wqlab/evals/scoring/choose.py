"""From words of a command line to a setting."""

from __future__ import annotations

from typing import Any

from wqlab import registry
from wqlab.errors import UnknownNameError
from wqlab.evals.scoring.library import TransformersSetting
from wqlab.evals.scoring.plans import PlanSetting
from wqlab.evals.scoring.settings import FULL, CacheSetting, Setting

WINDOWQUANT = "windowquant"
_LIBRARY = {f"transformers-{backend}": backend for backend in ("quanto", "hqq", "fp8")}
_PLAN = ("scorer", "alpha", "normalize", "order", "granularity", "window_size")
_UNIFORM = ("num_bits", "granularity", "window_size", "sink_windows", "policy")


def choose_setting(method: str = FULL, **options: Any) -> CacheSetting:
    """Return the setting that `method` names; options of other kinds of settings are not looked at.

    Parameters
    ----------
    method : str
        ``fp16``, a registered quantizer, ``windowquant``, or ``transformers-`` and a backend of its QuantizedCache.
    **options
        Of `Setting`, `PlanSetting` and `TransformersSetting`.

    Raises
    ------
    UnknownNameError, ParameterError
        As those do.
    """
    if method == WINDOWQUANT:
        return PlanSetting(**{name: options[name] for name in _PLAN if name in options})
    if method in _LIBRARY:
        bits = options.get("num_bits")
        return TransformersSetting(_LIBRARY[method], **({} if bits is None else {"num_bits": bits}))  # type: ignore[arg-type]
    known = [FULL, WINDOWQUANT, *_LIBRARY, *registry.names("method")]
    if method not in known:
        raise UnknownNameError("method", method, known)
    return Setting(method, **{name: options[name] for name in _UNIFORM if name in options})
