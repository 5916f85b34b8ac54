"""Base shape, parametrization and tuned hyperparameters: the flags that the verbs of scale share, and shapes."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import tyro

from manyheads.cli.parsing import OptionalFloat, OptionalPath
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.models.config import ModelConfig
    from manyheads.scaling import BaseHyperparameters, Parametrization
    from manyheads.scaling.parametrization.training_rules import TrainingChange
    from manyheads.transformer import Shape

Sizes = Annotated[Optional[str], tyro.conf.arg(metavar="N,H,L", help_behavior_hint="")]
Change = Annotated[Union[None, tuple[float, float]], tyro.conf.arg(metavar="BASE NOW", help_behavior_hint="")]
Numbers = Annotated[Union[None, tuple[int, ...]], tyro.conf.arg(metavar="INT ...", help_behavior_hint="")]
Grid = Annotated[Union[None, tuple[float, float, int]], tyro.conf.arg(metavar="LOW HIGH COUNT", help_behavior_hint="")]


@dataclass(frozen=True)
class Theory:
    """Flags shared by scale, scale audit and scale check: the base shape and the parametrization."""

    base: Sizes = None  # Tuned shape: key dimension N, heads H, depth L.
    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """Optimizer; AdamW counts as adam, muon is Muon for the matrices of the blocks and AdamW for the rest."""
    split: Literal["whole", "fused", "heads-in", "heads"] = "whole"
    """What Muon orthogonalizes together: matrices, QKV as one, QKV head by head, or the output matrix by heads too."""
    shape_factor: str = "original"
    """Factor of Muon itself on the rate of an r x c matrix: none, original √max(1, r/c), match_rms_adamw \
0.2 √max(r, c), sqrt(r/c), sqrt(max(r,c)), or a framework's word: megatron:spectral, dion:rms_norm."""
    logit_exponent: float = 1.0
    """Attention logits are divided by N to this power: 1, or 0.5, which keeps heads different from each other."""
    depth_exponent: float = 1.0
    """Branches are divided by L to this power, from 0.5 to 1; at 1 every block keeps learning features."""
    richness: float = 1.0  # Factor of gamma0 over the base's: above 1 for more feature learning.
    scheme: Literal["completep", "mup", "standard"] = "completep"
    """Consistent in N, H and L; or, to compare, in width alone (mup), or one learning rate for all (standard)."""

    def parametrization(self, base: "Shape", form: Any = "effective") -> "Parametrization":
        """Build the parametrization."""
        from manyheads.scaling import Muon, Parametrization

        # The standard scheme divides logits by the root of N; at the base both exponents agree.
        exponents = 0.5 if self.scheme == "standard" else self.logit_exponent, self.depth_exponent
        given: dict[str, Any] = {"optimizer": self.optimizer, "base": base, "scheme": self.scheme, "form": form}
        return Parametrization(*exponents, self.richness, **given, muon=Muon(self.split, self.shape_factor))


@dataclass(frozen=True)
class TunedTheory(Theory):
    """Flags shared by scale and scale audit: what was tuned at the base for Muon as well."""

    epsilon: float = 1e-8  # Adam's epsilon at the base.
    weight_decay: float = 0.0  # Decoupled weight decay at the base.
    muon_learning_rate: OptionalFloat = None
    """Learning rate of Muon's groups that was tuned at the base; --learning-rate is then AdamW's."""
    muon_weight_decay: float = 0.1  # Muon's weight decay at the base; 0.1 is the default of torch.
    rates: Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="ROLE=RATE ...", help_behavior_hint="")] = None
    """Learning rates tuned apart at the base, by role or part of a role: query_gain=0.05 key_gain=0.05."""
    batch: Change = None  # Batch size at the base and now.
    tokens: Change = None  # Tokens of the training at the base and now.
    weights: Change = None  # Number of weights at the base and now, for the rule power-lines.
    rules: Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="RULE ...", help_behavior_hint="")] = None
    """Rules for --batch and --tokens: sqrt, linear, horizon, steplaw, timescale, power-lines, or exponents that a
    preflight measured, batch=0.4 tokens=-0.3; what no rule names stays, an assumption."""

    def change(self) -> "TrainingChange":
        """Return the change of the training from the base."""
        from manyheads.scaling.parametrization.training_rules import TrainingChange

        if (self.rules or self.weights) and not (self.batch or self.tokens):
            raise UsageError("--rules and --weights: give --batch or --tokens, at the base and now, as well")
        sizes = {name: each for name in ("batch", "tokens", "weights") if (each := getattr(self, name))}
        return TrainingChange(rules=self.rules or (), optimizer=self.optimizer, **sizes)

    def own_rates(self) -> dict[str, float]:
        """Return the learning rates that were tuned apart."""
        found = {}
        for word in self.rates or ():
            name, _, rate = word.partition("=")
            if name in found:
                raise UsageError(f"--rates names {name} twice")
            try:
                if not name:
                    raise ValueError
                found[name] = float(rate)
            except ValueError:
                raise UsageError(f"--rates {word!r}: expected ROLE=RATE, such as query_gain=0.05") from None
        return found

    def tuned_muon(self, factors: bool = False) -> Any:
        """Return Muon's hyperparameters, none with another optimizer; factors alone need none."""
        from manyheads.scaling import MuonHyperparameters

        if self.optimizer != "muon":
            if self.muon_learning_rate is not None:
                raise UsageError("--muon-learning-rate without --optimizer muon: give both, or neither")
            return None
        if self.muon_learning_rate is None and not factors:
            raise UsageError("--optimizer muon needs --muon-learning-rate beside --learning-rate, which is AdamW's")
        return MuonHyperparameters(self.muon_learning_rate or 1.0, self.muon_weight_decay)


@dataclass(frozen=True)
class TunedBase(TunedTheory):
    """Flags shared by scale audit and scale preflight: what was tuned at the base."""

    learning_rate: OptionalFloat = None  # Learning rate that was tuned at the base.
    no_decay: Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="WORD ...", help_behavior_hint="")] = None
    """Parameters without weight decay: norm (gains, shifts), bias (biases, shifts), 1-d (parameters of one axis),
    embedding (tokens, positions); or a role of the table."""
    stds: OptionalPath = None
    """JSON file with the standard deviation of the init at the base by role; those of the family if absent."""
    roles: OptionalPath = None
    """File of lines "pattern of parameter names" = "part", for a model whose names are not known; the first one that
    fits counts."""

    def roles_beside(self, returned: Any) -> Any:
        """Return the file of roles, or what the user's function returned."""
        if returned is not None and self.roles is not None:
            raise UsageError(f"--roles {self.roles}, and TARGET returns roles as well: leave one of them out")
        return returned if self.roles is None else self.roles

    def hyperparameters(self) -> "BaseHyperparameters":
        """Return what was tuned at the base."""
        from manyheads.scaling import BaseHyperparameters

        if self.learning_rate is None:
            raise UsageError("--learning-rate is missing: give the learning rate that was tuned at the base")
        tuned = self.learning_rate, self.epsilon, self.weight_decay
        stds, muon, rates = self._read_stds(), self.tuned_muon(), self.own_rates()
        return self.change().at(BaseHyperparameters(*tuned, stds, self.no_decay or (), muon, rates))

    def _read_stds(self) -> dict[str, float]:
        from manyheads.models.checkpoints.files import read_json
        from manyheads.models.refusals import CheckpointRefused

        if self.stds is None:
            return {}
        try:
            found = read_json(self.stds, follow_links=True)
        except CheckpointRefused as error:
            raise UsageError(f"--stds {error}") from error
        if not all(type(value) in (int, float) for value in found.values()):
            raise UsageError(f'--stds {self.stds}: expected an object from role to number, {{"query": 0.02}}')
        return found


@dataclass(frozen=True)
class Notes:
    """Properties of a configuration beside its shape."""

    mlp_ratio: float = 4.0
    group: int = 1  # query heads that share a key head
    tied: bool = False
    family: str = ""  # of transformers; empty for fields of our own
    post_norm: bool = False
    fused: bool = False  # queries, keys and values in one matrix
    experts: tuple[int, int] = (0, 0)  # how many there are, and how many a token visits
    latent: tuple[float, ...] = ()  # latent attention: dimensions with positions and of values over N, query latents
    assumed: tuple[str, ...] = ()  # what was taken from the family


COUNTS = ("width", "heads", "layers", "key_value_heads", "key_dim", "experts", "active_experts")
SHAPE_FIELDS = (*COUNTS, "mlp_hidden", "mlp_ratio")


def read_shape(text: str | None, flag: str, is_file: bool | None = None) -> "tuple[Shape, Notes | None]":
    """Read a shape from N,H,L or from a configuration, with the configuration's other properties."""
    from manyheads.transformer import Shape

    if text is None:
        raise UsageError(f"{flag} is missing: give N,H,L (key dimension, heads, depth), such as 64,12,12")
    if is_file or (is_file is None and os.path.exists(text)):
        return _shape_of_config(text, flag)
    try:
        key_dim, heads, depth, *stream = map(int, text.split(","))
        if len(stream) > 1:
            raise ValueError
    except ValueError:
        instead = " (a config.json goes to --base-config)" if "--base-config" in flag else ", not a file"
        instead = ", or a config.json that exists" if is_file is None else instead
        wanted = "N,H,L, three integers for key dimension, heads and depth, such as 64,12,12"
        raise UsageError(f"{flag} {text!r}: expected {wanted}{instead}") from None
    return Shape(key_dim, heads, depth, *stream), None


def read_base(base: str | None, config: str | None) -> "tuple[Shape, Notes | None]":
    """Read the base shape from --base or --base-config."""
    if base and config:
        raise UsageError("--base and --base-config exclude each other: give one of them")
    return read_shape(base or config, "--base or --base-config", bool(config))


def _shape_of_config(path: str, flag: str) -> "tuple[Shape, Notes]":
    from manyheads.models.config import load_config, read_config
    from manyheads.models.shape import shape_of
    from manyheads.transformer import Shape

    if not os.path.exists(path):
        raise UsageError(f"{flag} {path}: no such file; give a config.json, or a folder with one")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "config.json")):
        raise UsageError(f"{flag} {path}: there is no config.json in this folder; give one that has it, or N,H,L")
    raw, origin = load_config(path)
    if raw.get("model_type"):
        config = read_config(raw, origin)  # refuses the file; what follows, the model
        try:
            return _shape_of_family(config)
        except UsageError as error:
            raise UsageError(f"{flag} {path}: {error}") from error
    model = shape_of(raw, origin)
    heads, key_dim = model.heads, model.head_dim or model.width // model.heads
    hidden = 4 * model.width if model.mlp_hidden is None else model.mlp_hidden
    notes = Notes(hidden / model.width, heads // (model.kv_heads or heads), model.tied)
    try:
        stream = None if model.width == key_dim * heads else model.width
        return Shape(key_dim, heads, model.layers, stream, model.kv_heads or heads, model.mlp_hidden), notes
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from error


def _shape_of_family(config: "ModelConfig") -> "tuple[Shape, Notes]":
    """Read a configuration of transformers; refuse attention that the theory does not describe."""
    from manyheads.models.architecture import read_body
    from manyheads.models.counts import describe_assumed

    assumed = describe_assumed(config, SHAPE_FIELDS)
    body = read_body(config)
    shape, family = body.shape, config.family.model_type
    sizes = (shape.hidden or 4 * shape.width) / shape.width, shape.heads // shape.group_heads
    return shape, Notes(*sizes, body.tied, family, body.post_norm, body.fused, body.experts, body.latent, assumed)
