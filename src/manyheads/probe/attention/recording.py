"""Recording of attention statistics while a PyTorch model of transformers runs."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import require
from manyheads._extras import xarray as xr
from manyheads.attention.flash_kernel import runs_on
from manyheads.errors import UsageError, check_integer
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.probe.attention.datasets import (
    FIGURES,
    LayerRecord,
    RowSample,
    draw_rows,
    estimate_mean,
    layer_number,
    stack_snapshots,
    take_snapshot,
)
from manyheads.probe.attention.fused import attend_call, fused_statistics, kernel_statistics
from manyheads.probe.attention.interface import AttentionCall, AttentionObserver, read_call
from manyheads.probe.attention.row_statistics import row_statistics


@dataclass
class AttentionRecord:
    """Attention statistics of the forward passes of a model, while `record_attention` is active.

    Attributes
    ----------
    rows
        Rows measured of each sequence; None: all, by fused kernels.
    figures
        Names of the figures that are measured.
    layers
        Name of an attention module → what was measured there, in the order of the first calls.
    """

    rows: int | None
    figures: frozenset[str] = frozenset(FIGURES)
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict, repr=False)
    _stacks: list[list[str]] = field(default_factory=list, repr=False)
    _rng: np.random.Generator = field(default_factory=np.random.default_rng, repr=False)
    _pending: list[tuple[Any, ...]] = field(default_factory=list, repr=False)  # sums that are still on a GPU

    def dataset(self) -> "xr.Dataset":
        """Return means over all rows that were measured, by layer and head.

        Returns
        -------
        xr.Dataset
            Over (layer, head), each figure with `<name>_uniform` (layer), its value at logits of zero under the same
            masks, and for 64 or more sampled rows `<name>_low` and `<name>_high`, a 95% interval of the sampling of
            rows. Heads or figures that a layer lacks are NaN. Coordinates: `module` (layer), `attention` (layer; "self"
            or "cross").

            ===============  ==========================================================================================
            entropy          -sum p log p of a row, a learned sink included, in nat
            logsumexp        log sum exp s, the sink included
            mean_logit       sum p s over the keys alone
            max_logit        the largest logit of any row; only if all rows were measured
            collision        sum p^2
            first_mass       mass on the first key that the row may see
            sink_mass        mass on the learned sink; key_entropy: entropy among the keys alone
            idle_mass        first_mass + sink_mass, near 1 for a dormant head
            distance         i - sum p j: how far back a row attends, in tokens; not for cross attention
            relative_output  RMS of a head's output before W_O over that of all heads of the layer, near 0 for a
                             dormant head
            ===============  ==========================================================================================
        """
        self.settle()
        snapshot = take_snapshot(self.layers, self.figures)
        return stack_snapshots([0], [snapshot], self.rows, self.unmeasured()).isel(step=0, drop=True)

    def __repr__(self) -> str:
        calls = sum(layer.calls for layer in self.layers.values())
        rows = "all rows" if self.rows is None else f"{self.rows} rows a sequence"
        return f"AttentionRecord({len(self.layers)} layers, {calls} calls, {rows})"

    def unmeasured(self) -> list[str]:
        """Return layers beside measured ones in which no attention call arrived, such as linear attention."""
        missing = []
        for stack in self._stacks:
            silent = [block for block in stack if not any(name.startswith(f"{block}.") for name in self.layers)]
            missing += silent if len(silent) < len(stack) else []
        return missing

    def observe(
        self, implementation: str, module: Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Tensor
    ) -> None:
        """Measure one attention call of a module that is recorded."""
        name = self._names.get(id(module))
        # Gradient checkpointing runs the forward pass again within the backward pass: those calls were measured.
        graph_task = getattr(torch._C, "_current_graph_task_id", None)  # private: absent, both passes are counted
        if name is None or (graph_task is not None and graph_task() != -1):
            return
        with torch.no_grad(), torch.autocast(arguments[0].device.type, enabled=False):
            call = read_call(implementation, name, module, arguments, keywords)
            self._measure(call, self._layer(name, call), output.detach())

    def attend(self, implementation: str, module: Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Compute one attention call in place of the module's own function, and measure it in the same pass."""
        if keywords.get("dropout") or (torch.is_grad_enabled() and any(each.requires_grad for each in arguments[:3])):
            raise UsageError("kernel=True has no gradients and no dropout: run model.eval() under torch.no_grad()")
        call = read_call(implementation, self._names.get(id(module), ""), module, arguments, keywords)
        if not call.fusable or not runs_on(call.query.device):
            raise UsageError(
                f"kernel=True on {call.query.device}: the kernel needs a CUDA device, Triton and a mask that is no "
                "rule of flex attention: leave kernel=False"
            )
        value = arguments[2][:, :, : call.key.shape[2]]
        if (name := self._names.get(id(module))) is None:
            return attend_call(call, value, ())[0]
        return self._sum_up(call, self._layer(name, call), value)

    def settle(self) -> None:
        """Add what was measured on a GPU to the layers; the only wait for it."""
        pending, self._pending = self._pending, []
        for layer, names, sums, uniform, largest in pending:
            counts, table = sums[-1].cpu().numpy(), sums[:-1].cpu().numpy()
            with np.errstate(invalid="ignore", divide="ignore"):
                means = table / counts
            found = {name: (mean, np.zeros_like(mean)) for name, mean in zip(names, means, strict=True)}
            top = None if largest is None else largest.double().cpu().numpy()
            layer.add(found, uniform(), float(counts.max()), top)

    def _layer(self, name: str, call: AttentionCall) -> LayerRecord:
        return self.layers.setdefault(name, LayerRecord(call.cross, call.query.shape[1], call.key.shape[1]))

    def _sum_up(self, call: AttentionCall, layer: LayerRecord, value: Tensor | None, output: Any = None) -> Any:
        """Measure all rows by the kernel; sums over rows stay on the device until `settle`."""
        B, H, n, _ = call.query.shape
        made, statistics, levels, counted, largest = kernel_statistics(call, self.figures, value)
        if output is not None:
            statistics["output_square"] = output.float().square().mean(-1).transpose(1, 2)
        sums = torch.stack(list(statistics.values())).sum((1, 3), dtype=torch.float64)
        if call.mask is None:
            counts = sums.new_full((1, H), B * n)
        else:
            seen = counted.expand(B, -1, -1)
            sums = torch.stack([torch.where(seen, each, 0.0) for each in statistics.values()])
            sums, counts = sums.sum((1, 3), dtype=torch.float64), seen.sum((0, 2)).double().expand(1, H)

        def uniform() -> dict[str, NDArray[np.float64]]:
            every, whole = counted.expand(B, -1, -1).double(), draw_rows(n, None, self._rng)
            return {name: _mean(level, every, whole)[0] for name, level in levels.items()}

        self._pending.append((layer, list(statistics), torch.cat([sums, counts]), uniform, largest))
        return made

    def _measure(self, call: AttentionCall, layer: LayerRecord, output: Tensor) -> None:
        if self.rows is None and not call.fusable:
            raise UsageError(
                "rows=None takes all rows by fused kernels, which know no block mask, and on the CPU no soft-cap or "
                "additive bias: give rows=64, or as many rows as the sequences are long"
            )
        if self.rows is None and runs_on(call.query.device):
            self._sum_up(call, layer, None, output)
            return
        sample = draw_rows(call.query.shape[2], self.rows, self._rng)
        index = torch.as_tensor(sample.index, device=call.query.device)
        if self.rows is None:
            statistics, levels, counted, largest = fused_statistics(call, self.figures)
        else:
            statistics, levels, counted = row_statistics(call, index)
            largest = statistics.pop("max_logit")
            largest = torch.where(counted, largest, -torch.inf).amax((0, 2)) if sample.whole else None
            levels.pop("max_logit")
        output = output if self.rows is None else output[:, index]
        statistics["output_square"] = output.double().square().mean(-1).transpose(1, 2)
        counts = counted.expand(len(call.query), -1, -1).double()
        found = {name: _mean(values, counts, sample) for name, values in statistics.items()}
        uniform = {name: _mean(values, counts, sample)[0] for name, values in levels.items()}
        weight = (counts.sum(0).cpu().numpy() @ sample.weight).max()
        layer.add(found, uniform, weight, None if largest is None else largest.double().cpu().numpy())


def _mean(values: Tensor, counts: Tensor, sample: RowSample) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard error by head of a figure (B, H, r) over the rows that count."""
    sums = torch.where(counts > 0, values.double(), 0.0).sum(0)
    return estimate_mean(sums.cpu().numpy(), counts.sum(0).cpu().numpy(), sample)


@contextmanager
def record_attention(
    model: Module,
    rows: int | None = 64,
    *,
    figures: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    seed: int = 0,
    kernel: bool = False,
) -> Iterator[AttentionRecord]:
    """Record attention statistics of every forward pass of a model within a `with` block, which gets the record.

    The output of the model is the same to the last bit, with gradients, dropout, gradient checkpointing and caches too:
    the attention function is called as before, and the statistics are computed beside it, in float32. `torch.compile`
    compiles other kernels around measured calls: outputs and gradients then differ by rounding, and Inductor draws
    other dropout. The configuration is untouched, other models in the process are not recorded, and the last state is
    put back at the end of the block, after an exception too.

    Parameters
    ----------
    model
        A PyTorch model of transformers whose modules call its attention interface, with one of the implementations
        "sdpa", "eager" and "flex_attention".
    rows
        Rows measured of each sequence: the first quarter of them for certain, the others drawn from strata. Shorter
        sequences are measured whole. None: all rows, out of fused kernel calls, with the exact largest logit.
    figures
        Names of those that are wanted, as `AttentionRecord.dataset` lists them; None: all. With `rows=None` collision
        and max_logit cost a second kernel call, max_logit a search after it, and distance a quarter of the first call.
    layers
        Numbers of the layers that are measured, as in the names of their modules; None: all.
    seed
        Of the choice of rows, which takes nothing from PyTorch's generators.
    kernel
        On a GPU, with `rows=None` and no gradients: the attention itself is computed by the kernel that measures it, in
        one pass in place of two. The output then differs from that of the model's own function by rounding.

    Raises
    ------
    ExtraMissing
        PyTorch is not installed.
    UsageError
        A figure is unknown, or the model computes its attention outside the interface (BLOOM, MPT, GPT-J, Falcon), by
        an implementation whose masks are not read, or with `rows=None` in a way that fused kernels do not know.

    Queries that are padding do not count: those whose own key is masked. Sequences that are packed without a mask
    between them are recorded as the model attends, across the documents.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from manyheads.probe import record_attention
    >>> sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=9, **sizes))
    >>> with record_attention(model, rows=None) as record:
    ...     output = model(torch.arange(9)[None])
    >>> found = record.dataset()
    >>> bool((found.entropy <= found.entropy_uniform + 1e-5).all())
    True
    """
    require("torch")
    record = empty_record(model, rows, figures, layers, seed)
    if kernel and rows is not None:
        raise UsageError(f"kernel=True with rows={rows}: the kernel measures all rows: give rows=None")

    with AttentionObserver(model, record.observe, record.attend if kernel else None).observing():
        yield record
    record.settle()


def empty_record(
    model: Module, rows: int | None, figures: Collection[str] | None, layers: Collection[int] | None, seed: int
) -> AttentionRecord:
    """Return a record of a model in which nothing is measured yet; parameters as in `record_attention`."""
    rows = None if rows is None else check_integer("rows", rows)
    chosen = frozenset(FIGURES if figures is None else figures)
    if isinstance(figures, str) or not chosen or not chosen <= FIGURES.keys():
        raise UsageError(f"figures={figures!r}: expected a collection of names out of {', '.join(FIGURES)}")
    if not hasattr(model, "named_modules"):
        raise UsageError(f"{type(model).__name__} is no PyTorch module: give the model itself")
    numbers = None if layers is None else set(layers) if isinstance(layers, Collection) else {layers}
    known = {number for name, _ in model.named_modules() if (number := layer_number(name)) is not None}
    if numbers is not None and not (numbers and numbers <= known):
        raise UsageError(f"layers={layers!r}: expected numbers out of {', '.join(map(str, sorted(known))) or 'none'}")
    named = [(name, module) for name, module in model.named_modules() if not numbers or layer_number(name) in numbers]
    names = {id(module): name for name, module in named}
    rng = np.random.default_rng(check_integer("seed", seed, 0))
    return AttentionRecord(rows, chosen, _names=names, _stacks=_stacks(model), _rng=rng)


def _stacks(model: Module) -> list[list[str]]:
    """Return the names of the blocks of each stack: the members of lists of modules that are in no other list."""
    lists = {
        name: [f"{name}.{block}" for block, _ in module.named_children()]
        for name, module in model.named_modules()
        if type(module).__name__ == "ModuleList"
    }
    return [blocks for name, blocks in lists.items() if not any(name.startswith(f"{other}.") for other in lists)]
