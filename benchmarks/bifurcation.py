"""Mean-field map of self-attention with 1-bit tokens: two largest Lyapunov exponents, scans, a phase diagram.

    python benchmarks/bifurcation.py

One thread, the published configuration. CPU seconds of the first call in a fresh process, compilation included, and the
least of three further calls.
"""

import os
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import numpy as np

from manyheads.theory.meanfield import OneBitNetwork, bifurcation_scan, lyapunov_spectrum
from manyheads.theory.meanfield.hopfield.attractors import classify_attractors

BETAS = np.array([0.8, 1.0, 1.2, 1.255, 1.26451, 1.266, 1.27, 1.28, 1.4, 1.554, 2.0, 3.0])
SCAN = np.linspace(0.02, 3, 150)


def phase_diagram(network):
    gains = np.geomspace(2, 400, 100)[:, None]
    found = lyapunov_spectrum(network, np.linspace(0.03, 3, 100), gain=gains, transient=3000, steps=2000, record=240)
    return classify_attractors(found)


def main():
    network = OneBitNetwork.published()
    works = {
        "two largest of twelve Lyapunov exponents at 12 temperatures, 60,000 steps each": lambda: lyapunov_spectrum(
            network, BETAS
        ),
        "scan of 150 temperatures from a fixed start, 16,000 steps each": lambda: classify_attractors(
            lyapunov_spectrum(network, SCAN, transient=10_000, steps=6000)
        ),
        "scan of 150 temperatures by continuation, 6,400 steps each": lambda: classify_attractors(
            bifurcation_scan(network, SCAN)
        ),
        "phase diagram of 100 x 100 points, 5,200 steps each": lambda: phase_diagram(network),
    }
    print("| work | first call [CPU s] | again [CPU s] |\n|---|---|---|")
    for name, work in works.items():
        spent = []
        for _ in range(4):
            start = time.process_time()
            work()
            spent.append(time.process_time() - start)
        print(f"| {name} | {spent[0]:.2f} | {min(spent[1:]):.2f} |", flush=True)


if __name__ == "__main__":
    main()
