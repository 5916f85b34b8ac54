"""The kernel of GPUs: under Triton's interpreter against float64, every line of its benchmark, and on a device."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_benchmark(folder, *options):
    out = folder / "gpu.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--out", str(out), *options]
    ran = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, check=False, timeout=500)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(out.read_text())


def run_interpreted(code):
    """Run code after the imports of a process with Triton's interpreter; return the words that it prints."""
    start = """
import sys; sys.path[:0] = sys.argv[1:]
import torch
from benchmarks.gpu import interpret_triton
interpret_triton()
from manyheads.attention import flash_kernel
"""
    command = [sys.executable, "-c", start + code, str(ROOT), str(ROOT / "src")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout.split()


def check_correctness(found):
    assert found["failures"] == []
    assert found["right"]
    assert max(max(errors.values()) for errors in found["worst"].values()) <= found["bound"]
    assert {"entropy", "logsumexp", "max_logit", "collision", "first_mass"} <= set(found["worst"]["float32"])


@pytest.mark.torch
@needs_triton
def test_errors_keep_the_bound_under_the_interpreter(tmp_path, seed):
    """Masks, windows, sinks, soft-caps, biases and grouped keys, at lengths that are no multiple of a block."""
    options = ["--device", "cpu", "--tiny", "--section", "correctness", "--seed", str(seed)]
    check_correctness(run_benchmark(tmp_path, *options)["correctness"])


@pytest.mark.torch
@needs_triton
def test_a_kernel_that_breaks_its_bound_does_not_serve():
    """A wrong maximum of one part in a thousand, as of a kernel that skips rescales, is found before it is used."""
    code = """
query = torch.randn(1, 2, 3, 16)
right, attend = flash_kernel.serves(query), flash_kernel.attend
flash_kernel._keeps_bound.cache_clear()
def wrong(*arguments, **options):
    output, found = attend(*arguments, **options)
    return output, found | {"max_logit": found["max_logit"] * 1.001}
flash_kernel.attend = wrong
print(right, flash_kernel.serves(query))
"""
    assert run_interpreted(code) == ["True", "False"]


@pytest.mark.torch
@needs_triton
def test_nan_logits_give_nan_in_every_statistic():
    """A NaN query spoils its row, a NaN key the rows that see it, and neither counts as a row without keys."""
    code = """
names, finite = flash_kernel.STATISTICS, torch.randn(1, 1, 40, 16)
for lazy in (False, True):
    cut = flash_kernel.Tiles(16, 16, 4, 1, lazy=lazy)
    for asked in (names, ("logsumexp",)):
        for spoilt in (slice(20, 21), slice(None)):
            bad = finite.clone()
            bad[:, :, spoilt] = torch.nan
            for query, key, rows in ((bad, finite, spoilt), (finite, bad, slice(spoilt.start, None))):
                out, found = flash_kernel.attend(query, key, finite, asked, scale=0.25, causal=True, cut=cut)
                expected = torch.zeros(40, dtype=torch.bool)
                expected[rows] = True
                found = [each[0, 0].isnan() for each in found.values()] + [out[0, :, 0].isnan().any(-1)]
                print(all(torch.equal(each, expected) for each in found))
"""
    assert run_interpreted(code) == ["True"] * 16


@pytest.mark.torch
@needs_triton
@pytest.mark.parametrize("width", [64, 576])
def test_the_kernel_compiles_for_a_gpu_without_one(width):
    """An H100 has 227 KiB of shared memory for a block; compiled is not run."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from manyheads.attention.flash_kernel import _kernel, _power, tiles
width = int(sys.argv[2])
cut, power = tiles(width, False), _power(width)
fixed = dict(D=width, DV=width, BLOCK_M=cut.rows, BLOCK_N=cut.keys, BLOCK_D=power, BLOCK_V=power, PRECISION="ieee")
on = ("CAUSAL", "HAS_V", "MEAN", "SUMS", "COLLISION", "WINDOW", "FIRST_MASS")
pointers = dict.fromkeys(("Q", "K", "V", "OUT"), "*bf16") | dict.fromkeys(("STATS", "SINK", "BIAS"), "*fp32")
types = pointers | {"MASK": "*u8", "FIRST": "*i64", "unit": "fp32", "softcap": "fp32"}
fixed |= {name: name in on for name in _kernel.arg_names if name.isupper() and name not in types | fixed}
types = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in _kernel.arg_names}
source = ASTSource(fn=_kernel, signature=types, constexprs=fixed)
options = {"num_warps": cut.warps, "num_stages": cut.stages}
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code, str(ROOT / "src"), str(width)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert 0 < int(ran.stdout) <= 227 * 1024


@pytest.mark.torch
@pytest.mark.slow
@needs_triton
def test_every_part_of_the_benchmark_runs(tmp_path):
    found = run_benchmark(tmp_path, "--device", "cpu", "--tiny")
    assert {name: part["error"] for name, part in found.items() if "error" in part} == {}
    assert found["recorder"]["losses equal to the bit"]
    apart = found["forward"]["times"][0]["apart"]
    assert max(apart.values()) < 1e-2  # half precision


@pytest.mark.torch
@pytest.mark.gpu
def test_errors_keep_the_bound_on_a_device(tmp_path, seed):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_correctness(run_benchmark(tmp_path, "--section", "correctness", "--seed", str(seed))["correctness"])


@pytest.mark.torch
def test_no_kernel_on_a_cpu_without_the_interpreter():
    import torch

    from manyheads.attention.flash_kernel import runs_on

    assert os.environ.get("TRITON_INTERPRET") or not runs_on(torch.device("cpu"))
    assert not runs_on(torch.device("meta"))
