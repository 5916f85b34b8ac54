"""Judgement of a preflight: prescribed growths, forward factors and settings at every shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from manyheads.models.names import join_layers
from manyheads.models.torch.model import ModelOptions, read_model, read_raw
from manyheads.scaling.audit.findings import UNJUDGED, Audit
from manyheads.scaling.audit.torch_models import audit_model
from manyheads.scaling.axes import Axis, size_along
from manyheads.scaling.checks.coordinate_check import TOLERANCE, Growth, check_growth
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.preflight_checks import expected
from manyheads.scaling.preflight_checks.factors import Factors, find_uses, multipliers
from manyheads.scaling.preflight_checks.result import FactorUse
from manyheads.scaling.preflight_checks.runs import Runs, seeded
from manyheads.scaling.preflight_checks.torch_trainer import TorchTrainer
from manyheads.scaling.preflight_checks.training import OUTPUTS, STREAM, Measured
from manyheads.scaling.torch.applied_factors import check_base
from manyheads.transformer.shape import Shape

SHORT_TRAINING = 100  # steps; in trainings of 100 slower gains lost .03 to .1 nat, in trainings of 400 nothing


class Judge:
    """Prescribed updates at every shape, settings of the optimizers, and factors of the forward pass."""

    def __init__(self, p: Parametrization | None, hyperparameters: BaseHyperparameters | None, run: Runs) -> None:
        self.p, self.hyperparameters, self.run = p, hyperparameters, run
        self.expected: dict[Shape, dict[str, expected.Expected]] = {}
        self.uses: list[FactorUse] = []
        self.audits: dict[Axis, Audit] = {}
        self.notes: list[str] = []
        # Where gains behind queries and keys start, by shape and the name of the parameter or its module
        self.gains: dict[tuple[Shape, str], float] = {}

    def read_all(self, shapes: Sequence[Shape], along: Mapping[Axis, Sequence[Shape]]) -> None:
        """Build every shape once more, read its parameters, measure its forward pass, and audit the largest ones."""
        p = self.p
        assert p is not None
        if not isinstance(first := self._build(p.base), TorchTrainer):
            self.expected = {shape: expected.expected_arrays(p, first.roles(), shape) for shape in shapes}
            self.notes.append("JAX: settings and forward factors not judged; audit_learning_rates takes rates by role")
            return
        base = self._read(first, p.base)
        for shape in shapes:
            trainer, read, factors = base if shape == p.base else self._read(self._build(shape), shape)
            if read.architecture.forward is not None:
                check_base(p, read.architecture.shape, trainer.training.roles.shape)
            largest = [axis for axis, each in along.items() if shape == max(each, key=partial(size_along, axis))]
            axis = next(axis for axis, each in [*along.items(), (next(iter(along)), shapes)] if shape in each)
            uses = find_uses(p, axis, shape, factors, base[2])
            forward = read.architecture.forward or multipliers(p, shape, uses)
            self.expected[shape] = expected.expected_updates(p, read, forward, shape)
            self.uses += [
                use for use in uses if not use.right or (largest and use.state != "unchanged" and use.shape != p.base)
            ]
            for each in read.architecture.parameters:
                if set(each.parts) & {"query_gain", "key_gain"}:
                    start = float((read.tensors[each.name].detach().float() + each.offset).abs().mean())
                    for name in (each.name, each.name.rpartition(".")[0]):
                        self.gains[shape, join_layers(name)] = start
            if largest and self.hyperparameters is not None:
                made, more = trainer.training, {"folded": forward, "fresh": True, "example": trainer.example}
                audit = audit_model(p, made.model, made.optimizer, self.hyperparameters, made.roles, shape, **more)
                self.audits[largest[0]] = audit
                self.notes += [f"settings: {note}" for note in audit.notes if UNJUDGED in note]
        if self.hyperparameters is None:
            self.notes.append("settings: not audited, give the hyperparameters that were tuned at the base")

    def _build(self, shape: Shape) -> Any:
        with seeded(self.run.seeds[0]):
            trainer = self.run.build(shape, self.run.seeds[0])
            trainer.look()
            return trainer

    def _read(self, trainer: TorchTrainer, shape: Shape) -> tuple[TorchTrainer, Any, Factors]:
        roles, config = trainer.training.roles, getattr(trainer.model, "config", None)
        given = shape if roles is not None or read_raw(config) is None else None
        read = read_model(trainer.model, ModelOptions(roles, given, True, trainer.example))
        return trainer, read, Factors(trainer.model, read, trainer.example)

    def growths(self, axis: Axis, shapes: Sequence[Shape], rows: Mapping[Shape, list[Measured]]) -> Iterator[Growth]:
        """Fit the growth of every update that all shapes have."""
        sizes = [size_along(axis, shape) for shape in shapes]
        names = [
            name for name in rows[shapes[0]][0].updates if all(name in each.updates for s in shapes for each in rows[s])
        ]
        random_parts = {
            name: [float(np.mean([each.updates[name].random for each in rows[shape]])) for shape in shapes]
            for name in names
        }
        if axis == "key_dim":
            moved = {name: [each.updates[name].size for each in rows[shapes[-1]]] for name in names}
            self.notes += self._slow_gains(shapes[-1], moved)
        largest = [max(parts[place] for parts in random_parts.values()) for place in range(len(shapes))]
        updates = [update for shape in shapes for each in rows[shape] for update in each.updates.values()]
        diverged = not all(math.isfinite(update.size) for update in updates)
        for name in names:
            values = [[rows[shape][seed].updates[name].size for shape in shapes] for seed in range(len(self.run.seeds))]
            if not np.all(values):
                self.notes.append(f"{name}: does not move in every training")
                continue
            whole = name.startswith((OUTPUTS, STREAM))
            required, least, known = self._prescribed(name, shapes, sizes)
            logs = [0.5 * math.log1p(each) for each in (largest if whole else random_parts[name])]
            least += min(0.0, expected.slope(sizes, logs))
            if self.p is not None and not known:
                self.notes.append(f"{name}: has no role of its own, and is not judged")
                continue
            yield check_growth(name, axis, sizes, values, required, TOLERANCE[axis], self.run.steps, least=least)
            if diverged:
                return  # one is enough

    def _slow_gains(self, shape: Shape, moved: Mapping[str, list[float]]) -> list[str]:
        """Return warnings of gains behind queries and keys that grow too slowly to offset the fall of logits with N.

        Initial logits over N fall as N^-1/2, and updates of keys lie along queries by a random share of 1/N up to N of
        about 100, so that each of the two gains has to grow by (N/N0)^(1/4). Behind Muon, whose matrices keep their
        size, nothing else does it.
        """
        p = self.p
        if p is None or p.optimizer != "muon" or p.logit_exponent != 1 or shape.key_dim <= p.base.key_dim:
            return []
        needed, said = (shape.key_dim / p.base.key_dim) ** 0.25 - 1, []
        for name, sizes in moved.items():
            if not (start := self.gains.get((shape, name), 0.0)):
                continue
            step = float(np.mean(sizes)) / self.run.steps / start
            steps = needed / step if step else math.inf
            if steps > SHORT_TRAINING:
                said.append(
                    f"{name}: gains of a norm behind queries or keys have to grow by (N/N0)^(1/4) = {1 + needed:.3g} "
                    f"and need {steps:.0f} steps for it; in shorter trainings tune their learning rate apart, as "
                    "learning_rates={'query_gain': ..., 'key_gain': ...} at a base of N >= 16"
                )
        return sorted(said)

    def _prescribed(self, name: str, shapes: Sequence[Shape], sizes: Sequence[int]) -> tuple[float, float, bool]:
        """Return the required and the least exponent, and whether they are known."""
        if self.p is None:
            return 0.0, 0.0, True
        found = [
            expected.find_expected(name, self.expected[shape], expected.whole_updates(self.p, shape))
            for shape in shapes
        ]
        if any(each is None for each in found):
            return 0.0, 0.0, False
        required, least = (
            round(expected.slope(sizes, [math.log(getattr(each, part)) for each in found]), 9)
            for part in ("required", "least")
        )
        return required, min(least, required), True
