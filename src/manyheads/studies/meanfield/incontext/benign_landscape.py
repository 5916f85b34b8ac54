"""`meanfield/benign-landscape`: saddle levels, fixed points, negative curvature, and training from random starts."""

import numpy as np

import manyheads.study as st
from manyheads.theory.meanfield.incontext import landscape, particles, prompt_length
from manyheads.theory.meanfield.incontext.task import FeatureTask, circle_task
from manyheads.theory.papers import KIM

DEGREES, AMPLITUDES = (1, 2, 2), (1.0, 0.7, 0.4)  # eigenvalues 1, 0.49, 0.16
FOREIGN = (3, 3, 4)  # degrees of the foreign features
SHIFT = 1e-3  # of the second difference, relative to the scale of the curvature
GLOBAL = 2e-6  # loss below which a start has reached the global minimum
STEP = 0.2  # of the Runge-Kutta method, in mean-field time; of one size, because ReLU has a kink at every node
BOUNDS = {"paper": "4 L^2/(k R_1^2)", "bound": "4 L^2/E|h|^2"}


class BenignLandscape(st.Study):
    """Random saddles beside the statements of the paper, and MLPs trained from Gaussian starts.

    Saddles have features that are missed, foreign features in their place, mixed at random.
    """

    name = "meanfield/benign-landscape"
    claim = "Saddles lie at half sums of missed eigenvalues; each has negative curvature"
    source = KIM.at(
        "C W = C S^-1 at fixed points; critical points: loss at least r/2, curvature at most -4 L^2/(k R_1^2). "
        "Levels and the bound -4 L^2/E|h|^2 are derived here"
    )
    revision = 3

    saddles: int = st.setting(20, "random saddles of a replicate", least=1, small=2)
    width: int = st.setting(256, "neurons of the trained MLP", least=1, small=16)
    nodes: int = st.setting(64, "nodes of the circle", small=24, full=256)
    duration: float = st.setting(600.0, "last time of the training of both layers", above=0, small=0.2)
    records: int = st.setting(120, "recorded times", least=1, small=3)

    def predict(self, key: st.Key) -> st.Record:
        levels = landscape.saddle_levels(circle_task(DEGREES, AMPLITUDES, self.nodes).covariance)
        return {"level": ("saddle", levels, "loss of the saddles")}

    def train(self, key: st.Key) -> st.Record:
        rng, task = st.generator(key), circle_task(DEGREES, AMPLITUDES, self.nodes)
        found = np.array([_measure_saddle(task, rng) for _ in range(self.saddles)])
        times = np.linspace(0.0, self.duration, self.records + 1)[1:]
        start = particles.Particles(rng.normal(size=(self.width, task.features)), rng.normal(size=(self.width, 2)))
        trained = particles.particle_flow(task, start, times, layers="both", step=STEP)
        return {
            "saddle_loss": ("draw", found[:, 0], "saddle loss"),
            "paper": ("draw", found[:, 1], f"second derivative over {BOUNDS['paper']}"),
            "bound": ("draw", found[:, 2], f"second derivative over {BOUNDS['bound']}"),
            "fixed_point": ("draw", found[:, 3], "largest entry of C W S - C, over sqrt(tr S tr S_o)"),
            "loss": ("moment", trained.loss, "loss of an MLP"),
            "condition": ((), trained.condition.max(), "largest condition number of S"),
            "moment": ("moment", times, "time"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        yield st.Claim(
            "Fixed points of the attention satisfy C W = C S^-1, also where C is singular "
            "(relative error of C W S = C)",
            trained["fixed_point"].max(skipna=False),
            st.near(0, 1e-8),
            "rounding, times the largest condition number of a drawn representation",
            "relative error",
        )
        yield st.Claim(
            "Critical points that are not global have a loss of at least r/2 (smallest loss)",
            trained["saddle_loss"].min(skipna=False),
            st.near(0.5 * min(AMPLITUDES) ** 2, (1e-9, np.inf)),
            "the paper's bound, and rounding",
            "smallest loss of a saddle",
        )
        yield st.Claim(
            "Losses of saddles are half sums of the missed eigenvalues (largest distance from a level)",
            abs(trained["saddle_loss"] - theory["level"]).min("saddle").max(skipna=False),
            st.near(0, 1e-9),
            "rounding",
            "largest distance from a level",
        )
        for name, basis in (
            ("paper", "the paper's bound, and the error of a second difference"),
            ("bound", "the same with the mean square of h in the place of k times its bound's square"),
        ):
            yield st.Claim(
                f"Saddles have a direction of curvature of at most -{BOUNDS[name]} (largest ratio to its size)",
                trained[name].max(skipna=False),
                st.near(-1, (np.inf, 1e-3)),
                basis,
                "curvature over the size of the bound",
            )
        text = "MLPs trained from Gaussian starts reach the global minimum (largest final loss)"
        basis = "the lowest saddle lies at 0.08; the loss falls algebraically, to 1e-6 at time 600"
        quantity = "largest final loss"
        yield st.Claim(text, trained["loss"].isel(moment=-1).max(skipna=False), st.near(0, GLOBAL), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        ends, count = trained["loss"].isel(moment=-1), trained.sizes["replicate"]
        yield st.lines(
            f"Training of both layers: {int((ends < GLOBAL).sum())} of {count} starts reach a loss of {GLOBAL:g}",
            "moment",
            "loss",
            {f"start {at}": trained["loss"].isel(replicate=at) for at in range(count)},
            reference={f"saddle, {level:.2g}": level + 0 * trained["moment"] for level in theory["level"].values},
            log="y",
            x_label="mean-field time",
            note=f"The largest final loss is {float(ends.max()):.2g}.",
        )
        # By level of the saddle, the range of what lies nearest to it.
        nearest = abs(trained["saddle_loss"] - theory["level"]).argmin("saddle")
        curves = []
        for group, (name, label) in enumerate(BOUNDS.items()):
            by_level = (-trained[name]).groupby(nearest.rename("level"))
            low, high = by_level.min(...), by_level.max(...)
            x, bottom, top = (tuple(map(float, each)) for each in (theory["level"][low["level"]], low, high))
            curves.append(st.Curve(x, bottom, label, group=group, low=bottom, high=top))
        yield st.Lines(
            "Curvature of random saddles over the size of the bounds",
            "loss of the saddle",
            "curvature over the bound",
            tuple(curves),
            log_y=True,
            note="Lines: the smallest ratio at a level; bands: up to the largest. Both bounds say 1 or more.",
        )


def _measure_saddle(task: FeatureTask, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Return the loss of a random saddle, its curvature over the two bounds' sizes, and the error at a fixed point."""
    missed = rng.permutation(task.features) < rng.integers(1, task.features + 1)
    foreign = circle_task(FOREIGN, nodes=len(task.inputs)).targets
    h = np.where(missed, foreign, task.targets) @ rng.normal(size=(task.features, task.features))
    escape = landscape.escape_direction(task, h)
    along = task.targets @ escape.rotation.T
    step = SHIFT * np.sqrt(escape.loss / abs(escape.curvature))
    before, here, after = (prompt_length.solve_attention(task, h + shift * along).loss for shift in (-step, 0.0, step))
    curvature = (before - 2 * here + after) / step**2  # without the closed form
    sizes = 4 * here**2 / np.array([task.features * np.abs(h).max() ** 2, (h**2).sum(1).mean()])
    second, cross = h.T @ h / len(h), task.targets.T @ h / len(h)
    limit = landscape.attention_fixed_point(task, h, rng.normal(size=second.shape))
    error = np.abs(cross @ limit @ second - cross).max() / np.sqrt((h**2).sum(1).mean() * np.trace(task.covariance))
    return here, *(curvature / sizes).tolist(), float(error)
