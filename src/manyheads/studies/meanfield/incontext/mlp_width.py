"""`meanfield/mlp-width`: loss trajectories of MLPs of finite width around the limit, one and both layers trained."""

from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.incontext.circle import circle_flow
from manyheads.theory.meanfield.incontext.particles import circle_particles, particle_flow
from manyheads.theory.meanfield.incontext.task import circle_task
from manyheads.theory.papers import KIM

RECORDS = 80
SHARES = np.arange(1, RECORDS + 1) / RECORDS
LARGEST_DIFFERENCE = 5e-5  # of two references: a tenth of the smallest RMS error, 0.5 N^(-1/2) at N = 2^20
LEARNED = 0.3  # amplitude of the target that is learned first, with a frozen first layer
STARTS = {  # G_0, activation, nodes
    "outer": (0.6 * np.eye(2), "relu", 128),
    "both": (0.3 * np.eye(2), "softplus", 64),
}
LAYERS = {"outer": "second layer", "both": "both layers"}


class MLPWidth(st.Study):
    """Loss trajectories at width N beside the limit: ReLU with a frozen first layer, softplus with both layers.

    Where the second layer is trained, independent neurons add about 0.8 N^(-1/2) to the initial amplitude `missed`: the
    error is linear in that only where the amplitude is much larger, else the escape from the saddle is shifted by a
    logarithm.
    """

    name = "meanfield/mlp-width"
    claim = "Losses at width N deviate by N^(-1/2) if amplitudes start well above N^(-1/2)"
    source = KIM.at("mean-field limit; rates of finite width are measured here")

    missed: float = st.setting(
        0.2, "initial amplitude of the second target where the second layer is trained", above=0, most=LEARNED
    )
    outer_widths: tuple[int, ...] = st.sweep(
        (256, 1024, 4096, 16_384, 65_536),
        "widths N where the second layer is trained",
        least=2,
        small=(32, 128),
        full=(256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576),
    )
    both_widths: tuple[int, ...] = st.sweep(
        (64, 256, 1024, 4096), "widths N where both layers are trained", least=2, small=(8, 32)
    )
    networks: int = st.setting(
        6, "MLPs of a replicate where the second layer is trained: single ones scatter fivefold", least=1, small=2
    )
    reference: int = st.setting(
        512, "width of the second reference; the first has 4 times as much where both layers are trained", small=256
    )
    outer_duration: float = st.setting(80.0, "last time where the second layer is trained", small=8.0)
    both_duration: float = st.setting(4.0, "last time where both layers are trained", small=0.1)

    def cells(self) -> tuple[st.Cell, ...]:
        return tuple(st.Cell(layers=layers, width=width) for layers in STARTS for width in self._widths[layers])

    def predict(self, key: st.Key) -> st.Record:
        """Return the limits, each from two references that agree.

        Raises
        ------
        CertificateError
            Closed equations and quadrature, or two quadratures, that differ by more than 5e-5 in the loss.
        """
        closed = circle_flow(self._signal("outer"), STARTS["outer"][0], self._times("outer")).loss
        pairs = {
            "outer": (closed, self._flow("outer", 2048, None)),
            "both": (self._flow("both", 4 * self.reference, None), self._flow("both", self.reference, None)),
        }
        differences = {layers: float(np.abs(first - second).max()) for layers, (first, second) in pairs.items()}
        if (worst := max(differences.values())) > LARGEST_DIFFERENCE:
            raise CertificateError(
                f"two references differ ({differences}): take a wider grid of particles, or end earlier",
                measured=worst,
                threshold=LARGEST_DIFFERENCE,
            )
        return {
            "loss": (("layers", "share"), np.stack([pairs[layers][0] for layers in STARTS]), "loss of the limit"),
            "difference": ("layers", list(differences.values()), "largest difference of two references"),
            "layers": ("layers", list(STARTS), "layers that are trained"),
            "share": ("share", SHARES, "time over the last time"),
        }

    def train(self, key: st.Key, layers: str, width: int) -> st.Record:
        rng = st.generator(key, width)
        losses = np.full((self.networks, RECORDS), np.nan)
        for place in range(self.networks if layers == "outer" else 1):
            losses[place] = self._flow(layers, width, rng)
        return {
            "loss": (("network", "share"), losses, "loss of an MLP; NaN for networks that are not trained"),
            "share": ("share", SHARES, "time over the last time"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        outer, both = self._errors(theory, trained).values()
        typical = ((both**2).mean("replicate") ** 0.5).values
        yield st.Claim(
            "With the first layer frozen and amplitudes well above N^(-1/2) the RMS error decreases as N^(-1/2)",
            st.exponent(outer, "width", "N", "RMS error of the loss"),
            st.near(-0.5, 0.15),
            "0.8 N^(-1/2) over the amplitude, a quarter at N = 256, changes the exponent by 0.05; scatter of "
            "48 networks: 0.07",
        )
        text = "With both layers trained the RMS error falls to less than 0.3 from the smallest to the largest width"
        basis = "stated without a power law: networks leave the symmetric start at different times"
        quantity = "error at the largest over that at the smallest N"
        yield st.Claim(text, float(typical[-1] / typical[0]), st.below(0.3), basis, quantity)
        text = "With both layers trained the RMS error falls at every step of the width (largest ratio)"
        basis, quantity = "a decrease at every step", "largest ratio of errors at neighbouring N"
        yield st.Claim(text, float((typical[1:] / typical[:-1]).max()), st.below(1), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for layers, widths in self._widths.items():
            loss, law = (data["loss"].sel(layers=layers) for data in (trained, theory))
            shown = dict.fromkeys((widths[0], widths[len(widths) // 2], widths[-1]))
            losses = {f"N = {width:,}": loss.isel(network=0).sel(width=width) for width in shown}
            apart, title = float(theory["difference"].sel(layers=layers)), f"Loss, {LAYERS[layers]} trained"
            note = f"Bands: replicates. Two references of the limit differ by {apart:.1e} at most."
            yield st.lines(title, "share", "loss", losses, reference={"limit": law}, note=note)
        found = self._errors(theory, trained)
        errors = {f"{label} trained": found[layers] for layers, label in LAYERS.items()}
        labels, shows = ("RMS error of the loss trajectory", "width", "RMS error of the loss"), ("both layers trained",)
        yield st.lines(*labels, errors, log="xy", note="Bands: replicates.", shows=shows)

    @property
    def _widths(self) -> dict[str, tuple[int, ...]]:
        return {"outer": self.outer_widths, "both": self.both_widths}

    def _errors(self, theory: st.Data, trained: st.Data) -> dict[str, xr.DataArray]:
        found = st.distance(trained["loss"], theory["loss"], over=("network", "share"))
        return {layers: found.sel(layers=layers, width=list(widths)) for layers, widths in self._widths.items()}

    def _times(self, layers: str) -> np.ndarray:
        return SHARES * (self.outer_duration if layers == "outer" else self.both_duration)

    def _signal(self, layers: str) -> np.ndarray:
        return np.diag([LEARNED, self.missed] if layers == "outer" else [0.1, 0.06])

    def _flow(self, layers: str, width: int, rng: np.random.Generator | None) -> np.ndarray:
        foreign, activation, nodes = STARTS[layers]
        start = circle_particles(self._signal(layers), foreign, width, rng, activation)
        chosen: Any = layers
        return particle_flow(
            circle_task(nodes=nodes), start, self._times(layers), activation=activation, layers=chosen, tolerance=1e-5
        ).loss
