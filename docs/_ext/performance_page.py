"""Figures of the GPU benchmark as a page, from benchmarks/results/gpu.json."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "`gpu results`"
RESULTS = ROOT / "benchmarks/results/gpu.json"


def setup(app):
    """Fill in the page before it is parsed."""

    def read(app, name, source):
        if name == "performance":
            source[0] = source[0].replace(MARK, page(json.loads(RESULTS.read_text(encoding="utf-8"))))

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def page(results):
    """Return the device and the tables of a measurement, or that there is none of a GPU."""
    device = results["device"]
    if device["device"] != "cuda":
        return "**Not measured on a GPU yet.** The last run was a dry run on a CPU, whose times mean nothing."
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks/gpu.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    versions = ", ".join(f"{name} {version}" for name, version in device["versions"].items())
    parts = [f"Measured on one {device['name']} with {versions}."]
    for name in ("kernel", "forward"):
        for one in results.get(name, {}).get("times", []):
            shape = ", ".join(f"{key} = {one[key]}" for key in ("n", "batch", "heads", "key_heads", "d") if key in one)
            parts += [f"**{benchmark.TITLES[name].capitalize()}**, {shape}", table(one)]
    rest = {name: found for name, found in results.items() if name not in ("device", "kernel", "forward")}
    return "\n\n".join([*parts, "```text\n" + "\n".join(benchmark.table(rest)).strip() + "\n```"])


def table(one):
    """Return times of the variants at one size."""
    lines = ["| variant | ms | ratio (least to most) | peak, MB |", "|---|---|---|---|"]
    for name, timed in one["times"].items():
        span = f" ({timed['least']:.3f} to {timed['most']:.3f})" if "least" in timed else ""
        memory = one["peak"].get(name)
        memory = "" if memory is None else f"{memory:.0f}"
        lines.append(f"| {name} | {timed['ms']:.3f} | {timed['ratio']:.3f}{span} | {memory} |")
    return "\n".join(lines)
