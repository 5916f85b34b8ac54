"""Training problem of a limit: inputs, targets, loss weights, steps, learning rate, architecture.

Tokens of all samples carry one index a = mu T + s (sample mu, position s). The residual stream starts as
h0_a = W_0 x_a / sqrt(D), so that inputs enter through their Gram matrix X_ab = x_a . x_b / D only. Read-outs carry an
index o: a sample where tokens are pooled, a token where every token predicts. With R (O, PT) the matrix that pools,
outputs are

    f_oc(t) = sum_a R_oa w_c(t) . h_a(t) / (gamma0 d),    loss = sum_o c_o(t) l(y_o, f_o(t) - f_o(0)).

Gradient descent with momentum, a schedule of rates, or mini-batches is linear in the gradients:

    W(t) = W(0) - sum_{t' < t} m(t, t') dloss(t')/dW,

with a memory m that is one for plain descent; mini-batches are weights c_o(t) that change with time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from scipy.special import logsumexp, softmax

from manyheads._arrays import check_arrays, takes_arrays
from manyheads._constraints import CHECKED, Constraint, check_fields, constrained
from manyheads._extras import Float
from manyheads._overview import ArraysAsShapes
from manyheads.errors import ShapeError, UsageError

MOST = 10**12
"""Steps, layers or cells, beyond which nothing is even foreseen."""
COUNT, POSITIVE = Constraint(least=1, most=MOST), Constraint(above=0)


@dataclass(frozen=True)
class Loss:
    """l(y, f) summed over classes, and Delta = -dl/df, for outputs and targets (O, C)."""

    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    error: Callable[[np.ndarray, np.ndarray], np.ndarray]
    check: Callable[[np.ndarray], None]


def _check_probabilities(targets: np.ndarray) -> None:
    if targets.shape[-1] < 2 or np.any(targets < 0) or not np.allclose(targets.sum(-1), 1):
        raise UsageError("cross-entropy takes probabilities over two classes or more, such as one-hot rows")


LOSSES = MappingProxyType(
    {
        "squared": Loss(
            value=lambda target, output: ((target - output) ** 2).sum(-1) / 2,
            error=lambda target, output: target - output,
            check=lambda targets: None,
        ),
        "cross-entropy": Loss(
            value=lambda target, output: logsumexp(output, axis=-1) - (target * output).sum(-1),
            error=lambda target, output: target - softmax(output, axis=-1),
            check=_check_probabilities,
        ),
    }
)


@dataclass(frozen=True, eq=False, repr=False)
class Problem(ArraysAsShapes):
    """A training problem whose infinite limits can be solved.

    Parameters
    ----------
    inputs
        Tokens (P, T, D) of P samples; X_ab = x_a . x_b / D must be of order one.
    targets
        (P, C) or (P,) where tokens are pooled, (P, T, C) or (P, T) where every token predicts. Numbers for the squared
        loss; for cross-entropy probabilities (..., C), such as one-hot rows.
    weights
        Weight of every read-out in the loss, shaped like the targets without their classes; None is one over their
        number. Zero makes a test sample. A leading axis of `steps` gives weights to every step: mini-batches.
    steps
        Updates S; outputs are recorded before each of them.
    learning_rate
        The one learning rate eta, of order one.
    richness
        gamma0: outputs are divided by it. Zero is no training problem; small is lazy.
    depth
        Blocks L.
    branch
        beta0 of the branch multiplier beta0 L^-alpha_L.
    depth_exponent
        alpha_L, 1/2 to 1.
    loss, read_out
        ``"squared"`` or ``"cross-entropy"``; ``"pool"`` or ``"token"``.
    causal, norm, embedding
        Whether tokens attend to earlier ones only; whether branches and the read-out see normalized streams (without
        gains); whether W_0 is trained.
    momentum
        mu of heavy-ball momentum: velocity = mu velocity + gradient.
    optimizer
        ``"sgd"``; Adam is refused.

    Raises
    ------
    ShapeError
        Arrays that do not fit together.
    UsageError
        A number out of its range, or a token of zeros that is to be normalized.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Problem
    >>> problem = Problem(np.ones((2, 3, 4)), targets=np.array([1.0, -1.0]), steps=5, learning_rate=0.1)
    >>> problem.samples, problem.tokens, problem.outputs, problem.gram.shape
    (2, 3, 2, (6, 6))

    References
    ----------
    B. Bordelon, H. Chaudhry, C. Pehlevan, "Infinite limits of multi-head transformer dynamics", arXiv 2405.15712: the
    architecture and its scalings. The memory, the weights in time and the notation here are derived, not printed there.
    """

    inputs: "Float[np.ndarray, 'samples tokens features']"
    targets: "Float[np.ndarray, '... classes']"
    weights: Any = None
    steps: int = constrained(16, COUNT)
    learning_rate: float = constrained(0.1, POSITIVE)
    richness: float = constrained(1.0, POSITIVE)
    depth: int = constrained(1, COUNT)
    branch: float = constrained(1.0, POSITIVE)
    depth_exponent: float = constrained(1.0, Constraint(least=0.5, most=1))
    loss: str = constrained("squared", Constraint(choices=tuple(LOSSES)))
    read_out: Literal["pool", "token"] = field(default="pool", metadata=CHECKED)
    causal: bool = False
    norm: bool = False
    embedding: bool = True
    momentum: float = constrained(0.0, Constraint(least=0, below=1))
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        inputs, targets = (_array(name, getattr(self, name)) for name in ("inputs", "targets"))
        if inputs.ndim != 3 or 0 in inputs.shape or not np.all(np.isfinite(inputs)):
            raise ShapeError(f"inputs of shape {inputs.shape}: give finite tokens (samples, tokens, features)")
        check_fields(self)
        for name in ("causal", "norm", "embedding"):  # 0 and 1 are refused
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise UsageError(f"{name}={value!r}: choose from True, False")
        if self.optimizer != "sgd":
            raise UsageError(
                f"optimizer={self.optimizer!r}: the limit closes for updates that are linear in the gradients, descent "
                "with or without momentum; Adam divides each entry by its own size, and has no closed limit"
            )
        axes = inputs.shape[:1] if self.read_out == "pool" else inputs.shape[:2]
        if targets.shape == axes:
            targets = targets[..., None]
        fits = targets.ndim == len(axes) + 1 and targets.shape[:-1] == axes and targets.size > 0
        if not fits or not np.all(np.isfinite(targets)):
            raise ShapeError(
                f"targets of shape {np.shape(self.targets)}: {axes} or {(*axes, 'C')}, finite, fit {self.read_out!r} "
                "read-out"
            )
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "weights", _weights(self.weights, axes, self.steps))
        self.loss_function.check(targets)
        if self.norm and not np.all(inputs.any(axis=-1)):
            raise UsageError(
                "norm=True with a token of zeros, which cannot be divided by its size: drop it, or norm=False"
            )

    @property
    def samples(self) -> int:
        """Number of samples P."""
        return self.inputs.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of a sample T."""
        return self.inputs.shape[1]

    @property
    def rows(self) -> int:
        """Tokens of all samples P T, the number of rows of one moment."""
        return self.samples * self.tokens

    @property
    def outputs(self) -> int:
        """Number of read-outs O: samples, or all tokens."""
        return self.samples if self.read_out == "pool" else self.rows

    @property
    def classes(self) -> int:
        """Outputs of one read-out C."""
        return self.targets.shape[-1]

    @property
    def loss_function(self) -> Loss:
        """The loss of one read-out and its derivative."""
        return LOSSES[self.loss]

    @cached_property
    def gram(self) -> np.ndarray:
        """X_ab = x_a . x_b / D, (PT, PT)."""
        flat = self.inputs.reshape(self.rows, -1)
        return flat @ flat.T / flat.shape[1]

    @cached_property
    def pooling(self) -> np.ndarray:
        """R (O, PT): which tokens a read-out averages."""
        if self.read_out == "token":
            return np.eye(self.rows)
        return np.kron(np.eye(self.samples), np.full((1, self.tokens), 1 / self.tokens))

    @cached_property
    def flat_targets(self) -> np.ndarray:
        """Targets (O, C)."""
        return self.targets.reshape(self.outputs, self.classes)

    @cached_property
    def loss_weights(self) -> np.ndarray:
        """Weights of the read-outs in the loss at every step, (S, O)."""
        scheduled = np.broadcast_to(self.weights, (self.steps, *self.targets.shape[:-1]))
        return scheduled.reshape(self.steps, self.outputs)

    @cached_property
    def memory(self) -> np.ndarray:
        """m(t, t') (S, S), zero unless t' < t: how much of the gradient at t' is in the weights at t."""
        ages = np.arange(self.steps)[:, None] - np.arange(self.steps)[None, :]
        if self.momentum == 0:
            return (ages > 0).astype(np.float64)
        return np.where(ages > 0, (1 - self.momentum ** np.maximum(ages, 0)) / (1 - self.momentum), 0.0)

    @takes_arrays
    def losses(self, outputs: "Float[np.ndarray, 'steps outputs classes']") -> "Float[np.ndarray, 'steps']":
        """Training loss (S,) of outputs (S, O, C) at every step."""
        return (self.loss_weights * self.loss_function.value(self.flat_targets, outputs)).sum(1)

    def attention_mask(self) -> np.ndarray:
        """Whether a token may attend to another of its sample, (T, T)."""
        square = np.ones((self.tokens, self.tokens), bool)
        return np.tril(square) if self.causal else square


def _array(name: str, given: object) -> np.ndarray:
    """Return an array of float64, or refuse what is none."""
    given = check_arrays(given, name)
    try:
        array = np.asarray(given)
        if array.dtype.kind in "biuf":
            return array.astype(np.float64)
    except ValueError:  # rows of different length
        array = np.asarray(None)
    raise ShapeError(f"{name}: give an array of real numbers, not of {array.dtype}")


def _weights(weights: object, axes: tuple[int, ...], steps: int) -> np.ndarray:
    """Return weights (...) of all steps or (S, ...) of every step, whatever was left out."""
    given = np.full(axes, 1 / np.prod(axes)) if weights is None else _array("weights", weights)
    if given.shape not in (axes, (steps, *axes)) or not np.all(np.isfinite(given)) or np.any(given < 0):
        raise ShapeError(f"weights of shape {given.shape}: {axes} or {(steps, *axes)}, finite and none negative")
    return given
