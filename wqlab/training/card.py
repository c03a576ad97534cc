"""The model card, written from the files that training and the bench left; no number in it is typed."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from wqlab import paths, records
from wqlab.evals import paired
from wqlab.models import shipped
from wqlab.training.pocket import LOG

_LOG_PROBS = [f"log_prob_{i}" for i in range(4)]
_TEXT = """# pocket VLM

A video-language model small enough to train in {minutes:.0f} minutes and to run on a laptop: what wqlab uses where a figure needs
a real one.
This file is written by `python -m wqlab.training.card` from the files beside it and from `data/recorded/{gpu}/pocketbench.csv`.

- **Parts:** EfficientNet-Lite0 (frozen; 64 tokens per frame at 256 px from its maps of stride 8, 16 and 32), a two-layer projector
  and LoRA of rank {rank} on all linear layers (both in
  `{file}`, {megabytes:.1f} MB, sha256 `{sha256}`),
  SmolLM2-135M-Instruct (frozen, dequantized from Q4_1). Encoder and language model are fetched; only what was trained here is in
  this folder, under the project's licence.
- **Data:** videos that the generator of PocketBench {generator} draws, from its training side: other backgrounds, other wordings
  and other combinations of colour and shape than evaluation, and an endless stream of seeds. No real video with real events.
- **Use:** `wqlab.load("pocket-vlm")`, or `wqlab.models.pocket.load()` for model, processor and tokenizer.

## Training

| run | steps | tokens per step | seed | share of the curriculum | minutes | hardware | date |
| --- | --- | --- | --- | --- | --- | --- | --- |
{runs}
{remarks}
AdamW; learning rates {projector_rate:g} (projector) and {lora_rate:g} (LoRA), warm-up, then a cosine over the last 40 % of the
curriculum; loss on the tokens of answers and descriptions. A run that begins late in the curriculum starts from the weights of the
one before. The curve is in `{log}` and drawn in `figures/pocketbench_card.png`; per kind of step, token accuracy over its first and
its last {window} steps (both levels together):

| step | frames | first | last |
| --- | --- | --- | --- |
{curve}

## Accuracy on PocketBench, held-out seeds

Four options, so chance is 25 %. Full precision (bfloat16), seed {seed}, measured on {hardware}, {date}, commit {commit}.
Intervals are 95 % bootstrap intervals over questions.

| split | frames | questions | accuracy | without seeing the video |
| --- | --- | --- | --- | --- |
{splits}

Per task:

| task | {columns} |
| --- | {rule} |
{tasks}

## Limits

It knows synthetic videos: coloured shapes, cards with characters and seven kinds of weather over photographs. It does not describe
photographs or films. Tasks near 25 % above were not learned; what a method does to them says nothing. Videos longer than
{longest} frames were never seen in training, and 127 frames fill the context.
"""


def render() -> str:
    """Return the card of the shipped weights.

    Raises
    ------
    UnknownNameError, RecordError
        When no GPU has recorded PocketBench, or its record is damaged.
    ValueError
        When the record is of other weights.
    """
    path = shipped.weights_path()
    meta = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    log = pd.read_csv(path.with_name(LOG))
    record = records.read("pocketbench", "h200")
    if set(record.data["weights"]) != {meta["sha256"][:12]}:
        raise ValueError(f"the record is of weights {set(record.data['weights'])}, the shipped ones are {meta['sha256'][:12]}")
    full = record.data[(record.data["setting"] == "fp16") & (record.data["protocol"] == "cache_then_ask")]
    seen = dict(iter(full[~full["blind"]].groupby(["split", "num_frames"])))
    blind = dict(iter(full[full["blind"]].groupby(["split", "num_frames"])))
    evidence = record.evidence()
    window = 20
    return _TEXT.format(
        gpu=record.gpu,
        rank=meta["rank"],
        file=path.name,
        megabytes=meta["num_bytes"] / 1e6,
        sha256=meta["sha256"],
        generator=record.data["generator"].iloc[0].split()[0],
        runs="\n".join(_runs(meta)),
        remarks="\n".join(f"\n{remark}\n" for remark in meta.get("remarks", [])),
        minutes=sum(run["seconds"] for run in _chain(meta)) / 60,
        projector_rate=meta["settings"]["projector_rate"],
        lora_rate=meta["settings"]["lora_rate"],
        log=LOG,
        window=window,
        curve="\n".join(_curve(log, window)),
        seed=record.data["seed"].iloc[0],
        hardware=evidence.hardware,
        date=evidence.date,
        commit=(evidence.commit or "")[:12],
        splits="\n".join(
            f"| {split} | {frames} | {len(rows)} | {_with_interval(rows)} | "
            + (_with_interval(blind[split, frames]) if (split, frames) in blind else "not asked")
            + " |"
            for (split, frames), rows in seen.items()
        ),
        columns=" | ".join(f"{split}, {frames} frames" for split, frames in seen),
        rule=" | ".join("---" for _ in seen),
        tasks="\n".join(_tasks(seen)),
        longest=log["num_frames"].max(),
    )


def _chain(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that led to these weights, the first one first."""
    chain = [meta]
    while chain[-1].get("started_from"):
        chain.append(chain[-1]["started_from"])
    return chain[::-1]


def _runs(meta: dict[str, Any]) -> list[str]:
    """Return a table row per run, the first one first."""
    rows = []
    for number, run in enumerate(_chain(meta), 1):
        settings, hardware = run["settings"], run["provenance"]["hardware"]
        begin = settings.get("begin", 0.0)
        end = begin + (1 - begin) * run["step"] / settings["steps"]
        tokens = settings["tokens_per_step"] * settings.get("processes", 1)
        devices = " + ".join(hardware["gpus"]) or hardware["cpu"]
        rows.append(
            f"| {number} | {run['step']:,} of {settings['steps']:,} | {tokens:,} | {settings['seed']} | "
            f"{begin:.0%} to {end:.0%} | {run['seconds'] / 60:.1f} | {devices} | "
            f"{run['provenance']['date'][:10]} |"
        )
    return rows


def _curve(log: pd.DataFrame, window: int) -> list[str]:
    rows = []
    for (kind, frames), found in log.groupby(["kind", "num_frames"]):
        weight = found["steps"]
        first, last = weight.cumsum() <= max(window, weight.iloc[0]), weight[::-1].cumsum()[::-1] <= max(window, weight.iloc[-1])
        means = [(found["token_accuracy"] * weight)[part].sum() / weight[part].sum() for part in (first, last)]
        rows.append(f"| {kind} | {frames} | {means[0]:.3f} | {means[1]:.3f} |")
    return rows


def _with_interval(rows: pd.DataFrame) -> str:
    mean, low, high = paired.mean_interval((rows["chosen"] == rows["answer"]).to_numpy(float))
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _tasks(seen: dict[Any, pd.DataFrame]) -> list[str]:
    right = {key: (rows["chosen"] == rows["answer"]).groupby(rows["task"]).mean() for key, rows in seen.items()}
    names = sorted({name for means in right.values() for name in means.index})
    return [f"| {name} | " + " | ".join(f"{means[name]:.2f}" for means in right.values()) + " |" for name in names]


def main() -> None:
    """Write the card beside the weights."""
    paths.write_text(shipped.weights_path().with_name("README.md"), render())


if __name__ == "__main__":
    main()
