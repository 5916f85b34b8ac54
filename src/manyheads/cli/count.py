"""`manyheads count`: exact cost of a model or of a function under a named convention."""

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import tyro

from manyheads._json import Json
from manyheads.cli.flags import check_flags, flag
from manyheads.cli.help.wrapping import fits, wrap_output
from manyheads.cli.parsing import ABSENT, OptionalInt, Switch, load_function
from manyheads.errors import UsageError
from manyheads.models.refusals import FamilyUnknown

if TYPE_CHECKING:
    from manyheads.costs import Cost, ModelShape

_SHAPE = re.compile(r"(?P<extents>scalar|\d+(x\d+)*)(:(?P<dtype>[a-z0-9_]+))?")

OptionalTarget = Annotated[
    Optional[str], tyro.conf.Positional, tyro.conf.arg(metavar="[TARGET]", help_behavior_hint="")
]


@dataclass(frozen=True)
class Count:
    """Count FLOPs of a transformer, a JAX function or a PyTorch module, exactly, under a named convention.

    TARGET is a config.json, a folder with one, or package.module:function: a JAX function with --shapes, or a function
    without arguments that returns (module, batch) of PyTorch. Without TARGET --layers, --width and --heads describe a
    transformer. Importing a module runs its code: name only code that you trust. A config.json is read as data.
    """

    target: OptionalTarget = None
    """A config.json, a folder with one, or package.module:function."""
    shapes: Annotated[Union[None, tuple[str, ...]], tyro.conf.arg(metavar="SHAPE ...", help_behavior_hint="")] = None
    """Shapes of the function's arguments: 4x128x64:bfloat16, 8:int32, scalar; float32 if no dtype is given."""
    trips: OptionalInt = None  # Assumed iterations of while loops of unknown length.

    layers: OptionalInt = None  # Blocks of the transformer.
    width: OptionalInt = None  # Model dimension.
    heads: OptionalInt = None  # Query heads.
    kv_heads: OptionalInt = None  # Heads of keys and values; as many as heads if absent.
    head_dim: OptionalInt = None  # Dimension of a head; width / heads if absent.
    mlp_hidden: OptionalInt = None  # Hidden width of the MLP; 4 x width if absent.
    gated: Annotated[Optional[bool], ABSENT, tyro.conf.FlagConversionOff] = None  # Whether the MLP has a gate.
    vocabulary: OptionalInt = None  # Number of tokens; 0 omits embedding and unembedding.
    causal: Annotated[Optional[bool], ABSENT, tyro.conf.FlagConversionOff] = None  # Whether the attention is causal.

    length: OptionalInt = flag(None, least=1)  # Tokens of a sequence; 1024 if absent, for images the number of patches.
    dtype: Annotated[Optional[Literal["float64", "float32", "float16", "bfloat16"]], ABSENT] = None
    """Dtype of weights, activations and cache; if absent that of the config.json, else float32."""
    batch: int = flag(1, least=1)  # Number of sequences.
    training: Switch = False  # Count forward and backward pass.
    meta: Switch = False  # Count a PyTorch module on the meta device, without memory.
    traced: Switch = False  # Count the model of transformers on the meta device, beside the closed form.
    decode: Switch = False  # Count one token with a key-value cache; --length is its context, the token included.
    tensor_parallel: int = flag(1, least=1)  # Devices that share heads, MLP and vocabulary: print what one holds.
    expert_parallel: int = flag(1, least=1)  # Devices that share the experts.
    generate: OptionalInt = None
    """Count a prompt of --length tokens and this many generated tokens, with a key-value cache."""
    convention: Annotated[Optional[str], ABSENT] = None
    """exact, halved, dense, mac, palm, megatron, flash, chinchilla, all-experts; for a program executed(-mac)."""
    compare: Switch = False  # Show the count under every convention.
    recompute: Annotated[Optional[Literal["none", "scores", "block", "block-needed", "block+scores"]], ABSENT] = None
    """Recomputation in the backward pass, instead of the convention's."""
    json: Switch = False  # Print JSON instead of a table.

    def run(self) -> int:
        """Count and print; return the exit status.

        Raises
        ------
        UsageError
            The target is unclear, a flag does not fit it, or a file is refused.
        """
        extra: dict[str, Json] = {}
        if self.target == "":
            raise UsageError("TARGET '': expected a config.json, a folder with one, or package.module:function")
        if self.traced:
            cost, extra = self._traced_cost()
        elif self.target and ":" in self.target and not os.path.exists(self.target):
            cost = self._function_cost()
        else:
            try:
                cost, extra = self._model_cost()
            except FamilyUnknown as unknown:
                cost, extra = self._run_cost(unknown)
        print(self._as_json(cost, extra) if self.json else wrap_output(self._as_text(cost, extra)))
        return 0

    def _as_json(self, cost: "Cost", extra: dict[str, Json]) -> str:
        from manyheads.costs.counting import compare_conventions

        compared = {"conventions": compare_conventions(cost)} if self.compare else {}
        return json.dumps({**extra, **cost.as_dict(), **compared}, indent=2)

    def _as_text(self, cost: "Cost", extra: dict[str, Json]) -> str:
        from manyheads.costs.counting import render_comparison

        table = next(filter(fits, (cost.table(), cost.table(shares=False))), cost.table())
        layers = _render_layers(extra.pop("each_layer", []))
        listed = "\n".join(f"{name.replace('_', ' ')}: {_format_value(value)}" for name, value in extra.items())
        return "\n\n".join(filter(None, (table, layers, listed, render_comparison(cost) if self.compare else "")))

    # Models

    def _parameters(self) -> dict[str, Json]:
        """Return the parameters of a configuration of transformers, nothing for other targets."""
        from dataclasses import asdict

        from manyheads.models.config import load_config, read_config
        from manyheads.models.counts import count_parameters, parameters_per_device

        raw, path = load_config(self.target) if self.target else ({}, Path())
        if not raw.get("model_type"):
            if self._devices() > 1:
                raise UsageError("--tensor-parallel and --expert-parallel: expected the config.json of a known family")
            return {}
        config = read_config(raw, path)
        found = asdict(count_parameters(config))
        named = {f"{name}_parameters": value for name, value in found.items() if value or name != "predicted"}
        if self._devices() > 1:
            held = parameters_per_device(config, self.tensor_parallel, self.expert_parallel)
            named["parameters_per_device"] = held
        return {name: value for name, value in named.items() if name != "notes_parameters"}

    def _devices(self) -> int:
        return self.tensor_parallel * self.expert_parallel

    def _traced_cost(self) -> "tuple[Cost, dict[str, Json]]":
        """Return the cost of the model of transformers, and its forward pass beside the closed form."""
        from manyheads.costs import count, transformer_cost
        from manyheads.models import shape_from_config
        from manyheads.models.checkpoints.loading import make_model
        from manyheads.models.config import load_config, read_config
        from manyheads.models.families.heads import has_language_head

        own = {"target", "length", "batch", "training", "convention", "compare", "json", "traced"}
        self._refuse_others(own, "does not fit --traced")
        if self.target is None or not os.path.exists(self.target):
            raise UsageError(f"--traced: {self.target or 'no target'}; expected a config.json of transformers")
        config, shape = read_config(*load_config(self.target)), shape_from_config(self.target)
        given = config.raw, has_language_head(config)
        length, assumed = self._length(shape.fixed_length and shape.fixed_length + shape.dropped_patches)
        try:
            cost = count(*make_model(*given, length, self.batch), training=self.training, device="meta")
        except (RuntimeError, IndexError) as error:
            raise UsageError(f"--traced: {length} tokens cannot run ({error}); give another --length") from error
        forward = replace(cost, items=tuple(item for item in cost.items if item.stage == "forward"))
        formula = transformer_cost(shape, length - shape.dropped_patches, self.batch)
        extra: dict[str, Json] = {"length": length, "batch": self.batch}
        for name in ("exact", "dense"):
            extra[f"forward_{name}_traced"] = forward.to(name).flops
            extra[f"forward_{name}_closed_form"] = formula.to(name).flops
        return replace(cost, notes=(*cost.notes, *assumed)).to(self._convention("exact")), extra

    def _run_cost(self, unknown: FamilyUnknown) -> "tuple[Cost, dict[str, Json]]":
        """Return the parameters and the cost of a model of transformers without a table, as it runs."""
        from manyheads.costs import count
        from manyheads.costs.cost import Cost
        from manyheads.models.checkpoints.loading import make_model
        from manyheads.models.config import load_config, text_part

        self._refuse_others({"target", "length", "batch", "training", "convention", "compare", "json"}, unknown.found)
        raw, whole = text_part(load_config(self.target or "")[0])
        length, assumed = self._length(0)
        try:
            model, batch = make_model(raw, True, length, self.batch)
        except (ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
            raise FamilyUnknown(unknown.path, f"{unknown.found}; no model is built: {str(error)[:90]}") from error
        said = (unknown.found, "counted on the meta device as it runs; no closed form")
        extra: dict[str, Json] = {"total_parameters": sum(each.numel() for each in model.parameters())}
        try:
            cost = count(model, batch, training=self.training, device="meta")
        except Exception as error:  # whatever the code of the model raises
            cost = Cost((), notes=(), unknown=(f"its forward pass does not run on the meta device ({error})"[:200],))
        notes = (*cost.notes, *said, *([f"the text part of {whole} alone"] if whole else []), *assumed)
        return replace(cost, notes=notes).to(self._convention("exact")), extra | {"length": length, "batch": self.batch}

    def _refuse_others(self, own: set[str], why: str) -> None:
        """Refuse flags that were given and are not `own`."""
        named = {each.name: each.default for each in fields(self) if each.name not in own}
        if given := [name for name, usual in named.items() if getattr(self, name) != usual]:
            raise UsageError(f"{_flags(given)}: {why}")

    def _length(self, fixed: int) -> "tuple[int, tuple[str, ...]]":
        """Return the length, and the note on it if it was assumed; check it and the batch."""
        check_flags(self)
        if fixed and self.length not in (None, fixed):
            raise UsageError(f"--length {self.length}: an image has {fixed} positions here; leave --length out")
        if self.length or fixed:
            return self.length or fixed, ()
        return 1024, ("no --length is given: 1024 is taken",)

    def _model_cost(self) -> "tuple[Cost, dict[str, Json]]":
        from manyheads import costs
        from manyheads.costs.formulas.decoding import token_cost
        from manyheads.costs.formulas.depth import crossover_length
        from manyheads.costs.formulas.memory import activation_bytes, embedding_table, matrix_parameters
        from manyheads.costs.formulas.model import layer_costs

        if self.meta or self.shapes or self.trips is not None:
            raise UsageError(
                "--shapes, --trips and --meta are for a function: give package.module:function as the target"
            )
        if self.training + self.decode + (self.generate is not None) > 1:
            raise UsageError("--training, --decode and --generate exclude each other: give one of them")
        shape, dtype = self._shape()
        length, assumed = self._length(shape.fixed_length and shape.fixed_length + shape.dropped_patches)
        shape = replace(shape, notes=(*shape.notes, *assumed))
        convention = self._convention("exact")
        extra: dict[str, Json] = self._parameters() | {"length": length, "batch": self.batch, "dtype": dtype}
        extra["matrix_parameters"] = matrix_parameters(shape)
        length -= shape.dropped_patches
        if shape.vocabulary:
            extra["token_embedding_parameters"] = embedding_table(shape)
        if self.decode:
            cost = token_cost(shape, length, self.batch, convention)
        elif self.generate is not None:
            cost = costs.generation_cost(shape, length, self.generate, self.batch, convention=convention)
        else:
            cost = costs.transformer_cost(shape, length, self.batch, self.training, convention=convention)
            extra["crossover_length"] = float(crossover_length(shape))
        if self.decode or self.generate is not None:
            extra |= self._cache(shape, length + (self.generate or 0))
        elif shape.kinds:
            each = layer_costs(shape, length, self.batch, self.training, convention)
            rows = zip(shape.kinds, each.items(), strict=True)
            extra["each_layer"] = [_describe_layer(kind, layers, layer.flops) for kind, (layers, layer) in rows]
        if self.training:
            kept: Any = convention.recompute if convention.recompute in ("none", "scores") else "block"
            extra["activation_bytes_at_least"] = activation_bytes(shape, length, self.batch, kept)
        return cost, extra

    def _cache(self, shape: "ModelShape", context: int) -> dict[str, Json]:
        """Return the bytes of the cache, in all and, of several devices, on each."""
        from manyheads.costs import kv_cache_bytes

        found: dict[str, Json] = {"kv_cache_bytes": kv_cache_bytes(shape, context, self.batch)}
        if self._devices() > 1:
            held = kv_cache_bytes(shape, context, self.batch, devices=self.tensor_parallel)
            found["kv_cache_bytes_per_device"] = held
        return found

    def _shape(self) -> "tuple[ModelShape, str]":
        """Return the shape, with notes on what was assumed, and the dtype."""
        from manyheads.costs import ModelShape
        from manyheads.models.config import load_config
        from manyheads.models.shape import FLOAT32_TAKEN, ITEMSIZES, config_dtype, shape_of

        names = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_hidden", "gated", "vocabulary", "causal")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        dtype: str | None = self.dtype
        if self.target:
            if given:
                raise UsageError(f"{self.target} gives the shape already: leave out {_flags(given)}")
            if not os.path.exists(self.target):
                raise UsageError(f"{self.target}: no such file; give a config.json, or a folder with one")
            config, path = load_config(self.target)
            shape = shape_of(config, path)
            dtype = dtype or config_dtype(config) or (f"{config['itemsize']} bytes" if "itemsize" in config else None)
        elif missing := [name for name in ("layers", "width", "heads") if name not in given]:
            wanted = f"a config.json, package.module:function, or a shape ({_flags(missing)} missing)"
            raise UsageError(f"nothing to count: give {wanted}")
        else:
            config, shape = given, ModelShape(**given)
        if "model_type" not in config:
            absent = [name for name in names if name not in config]
            assumed = ", ".join(f"{name}={json.dumps(getattr(shape, name))}" for name in absent)
            shape = replace(shape, notes=(*shape.notes, *([f"not given, taken: {assumed}"] if absent else [])))
        notes = tuple(note for note in shape.notes if note != FLOAT32_TAKEN)
        shape = replace(shape, notes=notes if dtype else (*notes, FLOAT32_TAKEN))
        return replace(shape, itemsize=ITEMSIZES[self.dtype]) if self.dtype else shape, dtype or "float32"

    def _convention(self, default: str) -> Any:
        from manyheads.costs.conventions import find_convention

        convention = find_convention(self.convention or default)
        return replace(convention, recompute=self.recompute) if self.recompute else convention

    # Functions

    def _function_cost(self) -> "Cost":
        from manyheads.costs import count

        own = {"target", "shapes", "trips", "convention", "compare", "json"}
        self._refuse_others(own | {"training", "meta"}, "for a transformer only; a function is described by --shapes")
        function = load_function(str(self.target))
        if not self.shapes and self.trips is None and (made := _made(function)):
            cost = count(*made, training=self.training, device="meta" if self.meta else None)
            return cost.to(self._convention("exact"))
        self._refuse_others(
            own, "for a function that returns a PyTorch module and a batch, without --shapes and --trips"
        )
        arguments = [_parse_shape(text) for text in self.shapes or ()]
        try:
            cost = count(function, *arguments, trips=self.trips)
        except UsageError:
            raise
        except (TypeError, ValueError) as error:
            shown = " ".join(self.shapes or ()) or "no arguments"
            raise UsageError(f"{self.target} cannot be traced with {shown}: {error}") from error
        if bare := [text for text in self.shapes or () if ":" not in text]:
            cost = replace(cost, notes=(*cost.notes, f"no dtype is given: float32 is taken for {', '.join(bare)}"))
        return cost.to(self._convention("executed"))


def _made(function: Callable[[], Any]) -> Any:
    """Return the PyTorch module and the batch that a function makes, None if it needs arguments or makes others."""
    import inspect

    from manyheads.costs.counting import is_torch

    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return None
    made = function if is_torch(function, ()) else function()
    module, *batch = made if isinstance(made, (tuple, list)) and made else (made,)
    if not callable(module) or not is_torch(module, tuple(batch)):
        return None
    if not batch:
        raise UsageError(f"count: {type(module).__name__} without a batch; give a function that returns both")
    return made


def _parse_shape(text: str) -> Any:
    import jax
    import jax.numpy as jnp

    match = _SHAPE.fullmatch(text)
    if not match:
        raise UsageError(f"--shapes {text!r}: expected extents and a dtype, such as 4x128x64:float32 or scalar:int32")
    try:
        dtype = jnp.dtype(match["dtype"] or "float32")
    except TypeError as error:
        raise UsageError(f"--shapes {text!r}: {match['dtype']!r} is no dtype") from error
    extents = () if match["extents"] == "scalar" else tuple(map(int, match["extents"].split("x")))
    return jax.ShapeDtypeStruct(extents, dtype)


def _flags(names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _describe_layer(kind: "ModelShape", layers: str, flops: int) -> dict[str, Json]:
    """Return what tells the layers of a kind from others, and what one of them costs."""
    attention = f"window of {kind.window}" if kind.window else "all positions"
    experts, hidden = kind.experts, kind.mlp_hidden
    mlp = [f"{experts.active} of {experts.count} experts of {experts.hidden}"] if experts else []
    mlp += [f"{'shared ' if experts else ''}{hidden}"] if hidden else []
    parameters = {"matrix_parameters": kind.projection_macs + kind.mlp_macs, "flops": flops}
    return {"layers": layers, "number": kind.layers, "attention": attention, "mlp": " + ".join(mlp)} | parameters


def _render_layers(rows: "list[dict[str, Json]]") -> str:
    from manyheads._overview import render_table

    if not rows:
        return ""
    heads = ("layers", "number", "attention", "MLP", "matrix parameters", "FLOPs of one")
    return render_table(heads, [[_format_value(value) for value in row.values()] for row in rows])


def _format_value(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
