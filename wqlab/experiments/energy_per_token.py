"""Energy of decode attention per token, FP16 against mixed widths, from the record of the bench energy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from wqlab.bench.decode_caches import MIXES, cache_bytes
from wqlab.bench.energy import SHAPE, EnergyBench
from wqlab.experiments import Experiment, Parameters, gpu_records, slider
from wqlab.registry import register
from wqlab.types import Evidence, Result, Value

if TYPE_CHECKING:
    import pandas as pd

_ENERGY = ("energy_mj", "energy_low_mj", "energy_high_mj", "above_idle_mj", "power_w", "idle_w", "energy_percent")


class EnergyPerTokenParameters(Parameters):
    """Parameters of `energy_per_token`.

    Parameters
    ----------
    gpu : str
        Whose record.
    layers : int
        Of the language model; the bench measures one.
    """

    gpu: str = Field("h200", description="whose record of the bench")
    layers: int = slider(28, 1, 80, 1, "layers; 28 are those of LLaVA-OneVision-7B", ge=1)


@register("stem", "energy_per_token")
class EnergyPerToken(Experiment[EnergyPerTokenParameters]):
    """Energy, latency and bytes of a token's attention per mix, and each as a share of FP16; what is missing is said."""

    stem = "energy_per_token"
    title = "Energy of decode attention per token"
    paper = "WindowQuant, Sect. 3.3; the paper measures no energy"
    Parameters = EnergyPerTokenParameters

    def run(self, parameters: EnergyPerTokenParameters) -> Result:
        """Compute one row per mix.

        Returns
        -------
        Result
            ``bytes_mb`` of keys and values that a token's attention reads in all layers, and ``bytes_percent`` of FP16. With a
            record also ``latency_us`` and ``latency_percent``; where NVML told it, ``energy_mj`` as mean of the rounds with the
            lowest and highest, ``above_idle_mj``, ``power_w``, ``idle_w`` and ``energy_percent``.

        Raises
        ------
        UnknownNameError
            For a GPU key that does not exist.
        """
        import pandas as pd

        p = parameters
        table = pd.DataFrame({"mix": list(MIXES)}).set_index("mix")
        per_token = [cache_bytes(SHAPE, mix).total / SHAPE.batch * p.layers for mix in MIXES]
        table["bytes_mb"] = [number / 1e6 for number in per_token]
        table["bytes_percent"] = [100 * number / per_token[0] for number in per_token]
        counted = Evidence(kind="simulated", source="counted from the layout of the cache")
        evidence = dict.fromkeys(("bytes_mb", "bytes_percent"), counted)
        notes = [
            f"One token's attention in {p.layers} layers: {SHAPE.num_heads} heads over {SHAPE.num_kv_heads} KV heads of "
            f"{SHAPE.head_dim} channels, {SHAPE.seq_len:,} tokens of cache per row, {SHAPE.batch} rows at a time; one layer was "
            "run, over caches that rotate through four times the L2 cache."
        ]
        record, inputs = gpu_records.find(EnergyBench.name, p.gpu), []
        if record is None:
            notes.append(f"No energy yet on {p.gpu}: {gpu_records.how_to_get(EnergyBench.name, p.gpu)}.")
        else:
            inputs = [record.input()]
            found = _by_mix(record.data, p.layers)
            table = table.join(found.dropna(axis=1, how="all"))
            evidence |= {column: record.evidence() for column in table.columns if column not in evidence}
            notes += _said(record.data, found)
        return Result(
            stem=self.stem,
            parameters=p.model_dump(mode="json"),
            data=table.reset_index(),
            evidence=evidence,
            values=_values(table),
            inputs=inputs,
            notes=notes,
        )


def _by_mix(data: pd.DataFrame, layers: int) -> pd.DataFrame:
    """Return what the record's rounds give per mix, for a token in all layers."""
    rounds = data.groupby("mix", sort=False)
    found = rounds[["latency_us", "power_w", "idle_w"]].mean()
    found["latency_us"] *= layers
    found["energy_mj"], found["above_idle_mj"] = (
        layers * rounds[f"{name}_per_token_mj"].mean() for name in ("energy", "above_idle")
    )
    found["energy_low_mj"], found["energy_high_mj"] = (
        layers * rounds["energy_per_token_mj"].agg(which) for which in ("min", "max")
    )
    for name, column in (("latency", "latency_us"), ("energy", "energy_mj")):
        found[f"{name}_percent"] = 100 * found[column] / found[column].get("fp16", float("nan"))
    return found


def _said(data: pd.DataFrame, found: pd.DataFrame) -> list[str]:
    """Return notes on where the energy is from, or why there is none."""
    if found["energy_mj"].isna().all():
        return [f"Energy is {data['source'].iloc[0]}."]
    sources = ", ".join(dict.fromkeys(data.loc[data["power_w"].notna(), "source"]))
    notes = [
        f"Energy is that of the whole GPU with its memory ({sources}); the part above idle leaves out the "
        f"{data['idle_w'].mean():.0f} W that it took before anything ran. Black marks: lowest and highest of "
        f"{data['round'].nunique()} rounds."
    ]
    if data["idle_w"].isna().all():
        notes = [f"Energy is that of the whole GPU with its memory ({sources}); idle power is {data['idle_source'].iloc[0]}."]
    lacking = [mix for mix in MIXES if mix not in found.index or found.loc[[mix], "energy_mj"].isna().any()]
    return [*notes, f"Without energy in the record, see its column note: {', '.join(lacking)}."] if lacking else notes


def _values(table: pd.DataFrame) -> dict[str, Value]:
    found = {}
    for mix, row in table.iterrows():
        key = str(mix).replace("/", "_")
        for column, unit in (("energy_mj", "mJ"), ("energy_percent", "%"), ("latency_percent", "%"), ("power_w", "W")):
            if column in table:
                found[f"{column}_{key}"] = (float(row[column]), unit, column)
    return gpu_records.stated(found)
