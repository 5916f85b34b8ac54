r"""Update recorder: how far each step of an optimizer moves the weight matrices, a few of them in turn.

With the decoupled weight decay of AdamW and Muon taken out, the update of a weight is

.. math:: U = W_{t+1} - W_t + \eta \lambda W_t.

Its figures are RMS(U) / RMS(W), and for optimizers that orthogonalize it (Muon) the stable rank and

.. math:: \mathrm{orthogonality} = \frac{\sum_i \sigma_i(U)}{\sqrt{\min(m, n)}\, \|U\|_F} \le 1,

with equality if all singular values are equal; Newton-Schulz iterations that stop early stay below 1.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyheads._extras import require
from manyheads._extras import xarray as xr
from manyheads.errors import ManyheadsError, UsageError, check_integer
from manyheads.models.parameters import recognize
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import INNER, unwrap
from manyheads.probe.attention.datasets import layer_number
from manyheads.probe.heads.head_weights import HeadLayout, head_layouts
from manyheads.probe.live.reading import as_series
from manyheads.probe.live.sharded import gram, local, squared_norm
from manyheads.probe.live.step_log import Line
from manyheads.probe.live.trackers import Output, Row, TimeBudget, Tracker
from manyheads.spectra.levels import expected_stable_rank, marchenko_pastur_density, marchenko_pastur_edges

# Optimizers that shrink weights by learning rate x weight decay beside the step of the gradient.
DECOUPLED = ("AdamW", "Muon")
# RMS of relative rounding errors in units of eps, for significands that are uniform on the logarithmic scale.
ROUNDING = 0.212


class _Matrix(NamedTuple):
    name: str
    parameter: Tensor
    optimizer: Any
    group: Mapping[str, Any]


class UpdateRecorder:
    """Record the sizes of the updates of weight matrices while a model trains, within a share of its time.

    A few matrices in turn are copied before an optimizer's step and compared after it. The training is the same to the
    last bit, also compiled: weights and gradients are read and never written.

    Parameters
    ----------
    model
        The model that is trained.
    matrices
        How many matrices are measured at a time.
    share, every, store, tracker
        As in `AttentionRecorder`.
    spectra
        Whether stable rank and orthogonality of the update are computed as well; None: for optimizers that
        orthogonalize it.

    Notes
    -----
    Weight decay of AdamW and Muon, and of Adam with `decoupled_weight_decay`, is taken out. That of other optimizers is
    part of their gradient or unknown, and stays in; the coordinate `weight_decay` says so. If several processes train
    together, `share=None` is needed.

    Examples
    --------
    >>> import torch
    >>> from manyheads.probe.live.updates import UpdateRecorder
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> recorder = UpdateRecorder(model, share=None)
    >>> recorder.watch(optimizer)
    >>> before = model[0].weight.detach().clone()
    >>> model(torch.ones(1, 8)).square().sum().backward()
    >>> optimizer.step()
    >>> found = recorder.dataset().update_ratio.sel(matrix="0.weight").item()
    >>> abs(found - ((model[0].weight - before).norm() / before.norm()).item()) < 1e-6
    True
    """

    def __init__(
        self,
        model: Module,
        matrices: int = 2,
        *,
        share: float | None = 0.01,
        every: int = 1,
        spectra: bool | None = None,
        store: Path | str | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        require("torch")
        self._model, self._count, self._spectra = unwrap(model), check_integer("matrices", matrices), spectra
        self._budget = TimeBudget(share, every, next(self._model.parameters()).device)
        header = {"group": "updates", "model": type(self._model).__name__}
        self._output = Output(store, header, tracker)
        self._queue: list[_Matrix] = []
        self._optimizers: list[Any] = []
        self._before: list[tuple[_Matrix, Tensor, float]] = []
        self._step, self._written, self._next = -1, -1, 0
        self._given: int | None = None  # number of the next step, from `begin`
        self._done = False  # whether this step is measured already, by another optimizer
        self._about: dict[str, Line] = {}

    def watch(self, optimizer: Any) -> None:
        """Measure the steps of an optimizer from now on; several optimizers may train parts of the model.

        It is a `torch.optim.Optimizer`, or a wrapper with the attribute `optimizer`; UsageError if it is none, or
        trains no matrix of the model.
        """
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"{type(optimizer).__name__} is no torch.optim.Optimizer: give the optimizer itself")
        if optimizer in self._optimizers:
            return
        names = {id(parameter): _clean(name) for name, parameter in self._model.named_parameters()}
        found = [
            _Matrix(names[id(parameter)], parameter, optimizer, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.dim() >= 2 and parameter.requires_grad and id(parameter) in names
        ]
        if not found:
            raise UsageError(f"{type(optimizer).__name__} trains no matrix of the model: give the model's optimizer")
        self._queue += found
        self._optimizers.append(optimizer)
        optimizer.register_step_pre_hook(lambda *_: self._copy(optimizer))
        optimizer.register_step_post_hook(lambda *_: self._compare())

    def begin(self, step: int) -> None:
        """Give the number of the next step; without it, the steps of the first optimizer are counted."""
        self._given = step

    def end(self) -> None:
        """End a step; nothing is pending."""

    def finish(self, step: int) -> None:
        """End the training after so many updates."""
        self.abandon()
        self._output.log.close()

    def abandon(self) -> None:
        """Forget copies of a step that failed."""
        self._before = []

    def dataset(self) -> "xr.Dataset":
        """Return what was recorded.

        Returns
        -------
        xr.Dataset
            Over (step, matrix), NaN where it was not a matrix's turn: `update_ratio`, RMS of the update over that of
            the weight, beside `update_ratio_rounding` (matrix), what rounding to the type of the weight amounts to;
            `weight_rms`, `gradient_rms` as the optimizer gets it; `significand_bits`, which the weights before the
            step need, beside `significand_bits_dtype` (matrix); and, if spectra are computed, `orthogonality` and
            `stable_rank` of the update beside `orthogonality_random` and `stable_rank_random` (matrix), those of
            Gaussian matrices. Over (step, head_matrix, attention_layer, head), for queries, keys, values and outputs
            whose order is known and which are not sharded: `head_update_ratio`, `head_weight_rms`,
            `head_gradient_rms`. Coordinates: `role`, `layer` (-1: none), `optimizer` and `weight_decay` (matrix;
            "removed", "none" or "included"). UsageError if nothing was recorded.
        """
        return as_series(*self._output.log.read())

    def _copy(self, optimizer: Any) -> None:
        """Copy the matrices whose turn it is, if they belong to this optimizer."""
        self._before = []
        if optimizer is self._optimizers[0]:
            self._step, self._given = self._step + 1 if self._given is None else self._given, None
            self._done = False
        if self._done or self._queue[self._next].optimizer is not optimizer:
            return
        if not self._budget.admits(self._step, "updates are compared"):
            return
        self._done = True
        with self._budget.spending():
            queue = self._queue[self._next :] + self._queue[: self._next]
            turn = list(itertools.takewhile(lambda matrix: matrix.optimizer is optimizer, queue[: self._count]))
            self._next = (self._next + len(turn)) % len(queue)
            for matrix in turn:
                rate, decay = (float(matrix.group.get(key, 0.0)) for key in ("lr", "weight_decay"))
                removed = rate * decay if _decay(matrix) == "removed" else 0.0
                self._before.append((matrix, matrix.parameter.detach().clone(), removed))

    def _compare(self) -> None:
        """Compare the copies with the weights after the step, but for matrices that never had a gradient.

        Gradients are read here: a step may be given a closure that makes them, as Lightning's is.
        """
        copies = [each for each in self._before if each[0].parameter.grad is not None or each[0].name in self._about]
        self._before = []
        if not copies:
            return
        with self._budget.spending():
            if self._step <= self._written:  # the training started again
                self._about = {}
            figures = {each[0].name: self._measure(*each) for each in copies}
            new = {matrix.name: self._describe(matrix) for matrix, *_ in copies if matrix.name not in self._about}
            self._about, self._written = self._about | new, self._step
            cost = {"step": self._step, "cost": self._budget.cost, "elapsed": self._budget.elapsed}
            line = cost | {"figures": figures} | ({"matrices": new} if new else {})
            self._output.write(line, lambda: list(self._rows(self._written, figures)))

    def _measure(self, matrix: _Matrix, before: Tensor, decay: float) -> Line:
        """Return the figures of one update, from the weight before the step and the decay within it."""
        update, gradient = matrix.parameter.detach() - before, matrix.parameter.grad
        update = (update + decay * before) if decay and gradient is not None else update
        found: Line = {}
        for name, tensor in (("gradient_rms", gradient), ("weight_rms", before), ("update_ratio", update)):
            found |= self._rms(name, matrix, tensor)
        for name in ("update_ratio", "head_update_ratio"):  # of the root mean squares of update and weight
            if name in found:
                found[name] = _divide(found[name], found[name.replace("update_ratio", "weight_rms")])
        found["significand_bits"] = significand_bits(before)
        moved = squared_norm(update)
        if self._has_spectrum(matrix) and moved:
            squares = np.linalg.eigvalsh(gram(update)).clip(0)
            values = np.sqrt(squares[-min(update.shape) :])
            found["orthogonality"] = float(values.sum() / math.sqrt(len(values) * moved))
            found["stable_rank"] = float(moved / squares[-1])
        return found

    def _rms(self, figure: str, matrix: _Matrix, tensor: Tensor | None) -> Line:
        """Return the RMS of a tensor in the shape of a matrix, and of each of its heads; zeros for None."""
        count = matrix.parameter.numel()
        tensor = matrix.parameter.detach().new_zeros(matrix.parameter.shape) if tensor is None else tensor
        tensor = tensor.to_dense() if tensor.is_sparse else tensor
        found: Line = {figure: math.sqrt(squared_norm(tensor) / count)}
        if layout := self._layouts.get(id(matrix.parameter)):
            size = count / (len(layout.parts) * layout.heads)
            sums = layout.sums(tensor.double().square())
            found[f"head_{figure}"] = {part: np.sqrt(np.array(row) / size) for part, row in sums.items()}
        return found

    @functools.cached_property
    def _layouts(self) -> dict[int, HeadLayout]:
        return head_layouts(self._model)

    def _has_spectrum(self, matrix: _Matrix) -> bool:
        wanted = "ns_steps" in matrix.group if self._spectra is None else self._spectra
        return wanted and matrix.parameter.dim() == 2

    def _describe(self, matrix: _Matrix) -> Line:
        eps = torch.finfo(matrix.parameter.dtype).eps
        levels = {"update_ratio_rounding": ROUNDING * eps, "significand_bits_dtype": 1 - math.log2(eps)}
        if self._has_spectrum(matrix):
            rows, columns = matrix.parameter.shape
            levels["orthogonality_random"] = random_orthogonality(rows, columns)
            levels["stable_rank_random"] = expected_stable_rank(rows, columns)
        number, layout = layer_number(matrix.name), self._layouts.get(id(matrix.parameter))
        return {
            "attention_layer": layout.layer if layout else -1,
            "role": self._roles.get(matrix.name, ""),
            "layer": -1 if number is None else number,
            "optimizer": type(matrix.optimizer).__name__,
            "weight_decay": _decay(matrix),
            "levels": levels,
        }

    @functools.cached_property
    def _roles(self) -> dict[str, str]:
        """Names of weights → their roles, for families of models that are known."""
        config: Any = getattr(self._model, "config", None)
        names = [_clean(name) for name, _ in self._model.named_parameters()]
        with suppress(ManyheadsError):
            if hasattr(config, "to_dict") and (found := recognize(config.to_dict(), names)):
                return {name: str(role.role) for name, role in found.roles.items()}
        return {}

    def _rows(self, step: int, figures: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
        """Yield the figures of a step one by one."""
        for matrix, values in figures.items():
            levels = self._about[matrix]["levels"]
            for name, value in values.items():
                if not isinstance(value, Mapping):  # of every head
                    level = levels.get(f"{name}_rounding", levels.get(f"{name}_random"))
                    yield Row(step, None, None, f"{name}/{matrix}", value, None, level)


def significand_bits(tensor: Tensor) -> float:
    """Return the bits of the narrowest significand that holds a tensor: 24 in float32, 8 if rounded to bfloat16.

    Examples
    --------
    >>> import torch
    >>> [significand_bits(x) for x in (torch.tensor([1 / 3]), torch.tensor([1 / 3]).bfloat16().float())]
    [24.0, 8.0]
    """
    tensor = local(tensor)
    eps = torch.finfo(tensor.dtype).eps
    for narrow in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(narrow).eps > eps and tensor.numel():
            samples = (tensor.flatten()[:1024], tensor)  # a few entries tell almost always
            if all(torch.equal(each.to(narrow).to(each.dtype), each) for each in samples):
                return 1 - math.log2(torch.finfo(narrow).eps)
    return 1 - math.log2(eps)


def _divide(update: Any, weight: Any) -> Any:
    """Divide figures, those of every head too; NaN for weights of zero."""
    if isinstance(update, Mapping):
        return {part: _divide(update[part], weight[part]) for part in update}
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(np.asarray(weight) > 0, np.divide(update, weight), np.nan)
    return found if found.ndim else float(found)


@functools.cache
def random_orthogonality(rows: int, columns: int) -> float:
    """Return the orthogonality of a large Gaussian matrix, by the law of Marchenko and Pastur; 8 / (3 pi) if square."""
    low, high = marchenko_pastur_edges(rows, columns)
    angles = (np.arange(512) + 0.5) * np.pi / 512
    squares = (low + high) / 2 - (high - low) / 2 * np.cos(angles)
    density = marchenko_pastur_density(squares, rows, columns) * np.sin(angles)
    return float(density @ np.sqrt(squares) / math.sqrt(density.sum() * (density @ squares)))


def _decay(matrix: _Matrix) -> str:
    """Say what happens to weight decay: "none", "removed" from the update, or "included" in it."""
    if not float(matrix.group.get("weight_decay", 0.0)):
        return "none"
    known = type(matrix.optimizer).__name__ in DECOUPLED or matrix.group.get("decoupled_weight_decay", False)
    return "removed" if known else "included"


def _clean(name: str) -> str:
    return ".".join(piece for piece in name.split(".") if piece not in INNER)
