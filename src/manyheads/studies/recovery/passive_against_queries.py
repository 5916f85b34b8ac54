"""`recovery/passive-against-queries`: sequences, numbers and CPU time of learning from examples and by queries.

One layer of GPT's shape, with biases and a causal mask, is learned twice: by the student from random sequences, and by
queries. Both end with the layer; what differs is how many sequences they see, how many numbers they read of the
answers, and how long they compute. The student is told the number of heads, the form, and what number of sequences
suffices; the queries find out for themselves.
"""

import math
import time

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery import compare_layers, evaluate_layer, extract_layer, gpt_layer, sequences
from manyheads.recovery.examples.student import ENOUGH, StudentSettings, fit_student, free_numbers
from manyheads.recovery.fit.variable_projection import Examples, Form
from manyheads.theory.papers import CHEN_LI

HELD_OUT = 50  # sequences that tell the student whether to start again
RIGHT = 1e-10  # relative squared error at which it does not
EXACT = -6.0  # log10 of the relative error of matrices that are recovered: of the function's, about the square
OTHERS = ("noise", "verification")  # stages of an extraction that learn nothing of the layer
FORM = Form(key_bias=True, bias=True, causal=True)


class PassiveAgainstQueries(st.Study):
    """Random sequences and queries both give the layer; queries save computing, not sequences."""

    name = "recovery/passive-against-queries"
    claim = "Random examples and queries recover the layer; queries save computation only"
    revision = 2
    source = CHEN_LI.at("passive learning is the source's subject; the comparison with queries is made here")
    unread_prediction = "the least number of sequences is a lower bound for the plot; the claims compare two learners"
    grid = {"dim": "dims"}

    dims: tuple[int, ...] = st.sweep(
        (8, 16, 32), "token dimensions", count=1, multiple="heads", small=(4, 8), full=(16, 32, 64)
    )
    heads: int = st.setting(2, "heads of the layers, each of rank dim / heads", least=1, small=1, full=4)
    length: int = st.setting(4, "tokens of a random sequence", least=2)
    labels: float = st.setting(
        6.0, "numbers read for each free number of the layer that the student has to find", least=ENOUGH
    )

    def predict(self, key: st.Key) -> st.Record:
        """Return the least number of calls: free numbers of the layer over the numbers that a call's last row has."""
        # Theta and W of rank d/m cost 2 d^2 - d^2/m numbers a head's pair of d x d/m factors, summed: 4 d^2 - 2 d^2/m.
        least = [(4 * dim**2 - 2 * dim**2 / self.heads) / dim for dim in self.dims]
        return {"least": ("dim", least, "sequences")}

    def train(self, key: st.Key, dim: int) -> st.Record:
        for_layer, for_data, for_student, for_queries = st.generator(key).spawn(4)
        layer = gpt_layer(for_layer, dim, self.heads)
        free = free_numbers(Examples(np.zeros((1, 1, dim)), np.zeros((1, 1, dim)), FORM), self.heads)
        count = math.ceil(self.labels * free / (self.length * dim))
        x, held = (sequences(for_data, n, self.length, dim, distribution="gaussian") for n in (count, HELD_OUT))
        examples, held_out = (Examples(part, evaluate_layer(layer, part), FORM) for part in (x, held))
        settings = StudentSettings(labels=self.labels)
        fit = fit_student(examples, held_out, self.heads, for_student, wanted=RIGHT, settings=settings)

        begun = time.process_time()
        found = extract_layer(lambda x: evaluate_layer(layer, x), dim, seed=int(for_queries.integers(2**31)))
        seconds = time.process_time() - begun
        asked = [counts for stage, counts in found.counts.items() if stage not in OTHERS]
        errors = [compare_layers(layer, one.layer) for one in (fit, found)]
        logs = [math.log10(max(error.theta, error.projection, 1e-16)) for error in errors]
        timed = {"units": "s", "deterministic": False}
        return {
            "student_sequences": ((), float(count), "sequences shown to the student"),
            "query_sequences": ((), float(sum(one.calls for one in asked)), "sequences asked"),
            "student_numbers": ((), float(count * self.length * dim), "numbers read by the student"),
            "query_numbers": ((), float(sum(one.numbers for one in asked)), "numbers read by queries"),
            "student_error": ((), logs[0], "log10 of the student's largest relative error"),
            "query_error": ((), logs[1], "log10 of the queries' largest relative error"),
            "student_seconds": ((), fit.seconds, {"long_name": "CPU seconds of the student"} | timed),
            "query_seconds": ((), seconds, {"long_name": "CPU seconds of the queries"} | timed),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        largest = max(self.dims)
        last = trained.sel(dim=largest)
        for learner, who in (("student", "Random sequences"), ("query", "Queries")):
            text = f"{who} determine every layer"
            basis = "log10 of the worst relative error of Theta and W over all layers; the function's is smaller"
            quantity = "relative error (log10), worst layer"
            yield st.Claim(text, trained[f"{learner}_error"].max(), st.below(EXACT), basis, quantity)
        text = f"At d = {largest} queries need fewer sequences than random examples"
        figure = _log10(last["query_sequences"] / last["student_sequences"])
        basis = "log10 of the ratio, verification left out; all rows of a random sequence inform"
        quantity = "sequences of queries over those of examples (log10)"
        yield st.Claim(text, figure, st.below(0), basis, quantity, "refuted", resolution=1e-3)
        text = f"At d = {largest} queries need less CPU time than random examples"
        basis = "log10 of the ratio of CPU seconds, verification included for the queries"
        quantity = "CPU time of examples over that of queries (log10)"
        yield st.Claim(text, _log10(last["student_seconds"] / last["query_seconds"]), st.above(0), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for title, name, label, counted, shows in (
            ("Sequences", "sequences", "sequences", "not counted", ("need fewer sequences",)),
            ("Numbers read", "numbers", "numbers in the answers", "not counted", ()),
            ("Time", "seconds", "CPU time [s]", "counted for the queries", ("less CPU time",)),
        ):
            yield st.lines(
                title,
                "dim",
                label,
                {"student, random sequences": trained[f"student_{name}"], "queries": trained[f"query_{name}"]},
                {},
                {"free numbers / dimension": theory["least"]} if name == "sequences" else {},
                x_label="dimension d",
                log="xy",
                note=f"Bands: full range of the replicates. Verification is {counted}.",
                shows=shows,
            )


def _log10(ratio: xr.DataArray) -> xr.DataArray:
    return st.log(ratio) / np.log(10)
