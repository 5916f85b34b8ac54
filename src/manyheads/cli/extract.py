"""`manyheads extract`: recover the weights of a black-box attention layer, with a certificate."""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads._extras import np
from manyheads._json import Json
from manyheads.cli.flags import check_flags, flag
from manyheads.cli.help.wrapping import wrap_output
from manyheads.cli.parsing import OptionalFloat, OptionalInt, OptionalPath, Switch, load_function
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.recovery import Recovery, ServerLimits
    from manyheads.recovery.oracle.answers import LayerOracle

FILES = ("safetensors", "json", "html")
OF_CHECKPOINTS: Mapping[str, object] = {"layer": None, "through": "attention", "dtype": "float64"}
OF_SERVERS = ("max_length", "max_norm", "max_batch", "last_row", "calls_per_second", "decimals", "bits")
OF_FUNCTIONS: Mapping[str, object] = {"dim": None, "residual": False, "rotary": False, "scores": False, "mlp": False}
Method = Literal[
    "auto", "subspaces", "bounded", "sphere", "rotary", "rotary-sphere", "scores", "scores-sphere", "vocabulary",
    "probes",
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Function that is queried, with its stated properties, and the true layer if its weights are known."""

    oracle: "LayerOracle"
    truth: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Extract:
    """Recover the weights of a black-box attention layer from queries, and certify them on fresh sequences.

    ORACLE is package.module:function, from sequences (n, k, d) to outputs (n, k, d), or a module of PyTorch in its
    place; a saved layer (safetensors); or a Hugging Face checkpoint folder, with --layer. Weights of saved layers and
    checkpoints are compared with the result and used for nothing else. Importing a module runs its code: name only code
    that you trust. Files are read as data.
    """

    oracle: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ORACLE", help_behavior_hint="")]
    """A function, a saved layer, or a checkpoint folder."""
    layer: OptionalInt = flag(None, least=0)  # Layer of a checkpoint or of a model of transformers, from 0.
    through: Literal["attention", "block", "block-with-mlp"] = "attention"
    """Query the attention alone, with its norm and residual connection, or the block with its MLP."""
    dtype: Literal["float64", "float32"] = "float64"  # Precision of the outputs of a checkpoint.
    dim: OptionalInt = flag(None, least=1)  # Token dimension of a function without an attribute dim.
    residual: Switch = False  # The function has a residual connection: it adds its input.
    rotary: Switch = False  # The function has rotary positions (RoPE).
    scores: Switch = False
    """Other attention scores: RoPE with biases, query-key norms, soft caps, windows, ALiBi, relative biases, sinks."""
    mlp: Switch = False  # The function is a transformer block with its MLP; the MLP stays an oracle.
    method: Method = "auto"  # Method of extraction; auto chooses one from measured outputs.
    accurate: Switch = False  # Use more queries for more digits.
    noise: OptionalFloat = None  # Relative noise of the outputs; measured if absent.
    budget: OptionalInt = flag(None, least=1)  # Largest number of calls, one sequence each.
    seed: int = flag(0, least=0)  # Root of all randomness.
    tolerance: float = 1e-6
    """Largest relative squared error on a fresh sequence that is accepted; 1e-2 makes float32 six times cheaper."""
    verify: int = 400  # Number of fresh sequences for the verification.
    min_length: OptionalInt = None  # Fewest tokens of a sequence that the server takes.
    max_length: OptionalInt = None  # Most tokens of a sequence that the server takes.
    max_norm: OptionalFloat = None  # Largest norm of a token that the server takes.
    max_batch: OptionalInt = None  # Most sequences of one request; 1 is one sequence a call.
    last_row: Switch = False  # The server shows only the last row of every sequence.
    calls_per_second: OptionalFloat = None  # Rate limit of the server, in sequences.
    decimals: OptionalInt = None  # Decimals to which the outputs are rounded.
    bits: OptionalInt = None  # Significant bits to which the outputs are rounded.
    vocabulary: OptionalPath = None  # Embeddings (tokens, d) in a file .npy: the only tokens that the server takes.
    store: OptionalPath = None  # Folder for the outputs, from which the same command resumes.
    output: Path = Path("extracted.safetensors")
    """File for the recovered layer; its certificate (.json) and a report (.html) are written beside it."""
    report: Switch = False
    """Leak meter: add calls by stage, the counting bound, and the cheapest attacks known behind noise and rounding."""
    json: Switch = False  # Print JSON instead of sentences.

    def run(self) -> int:
        """Extract, write the three files, print the result, and return the exit status.

        Raises
        ------
        UsageError
            Flags that exclude each other, an oracle that cannot be found, or an output that would replace another file.
        RecoveryRefused
            No layer was verified on fresh sequences; no file is written.
        """
        from manyheads.recovery import ExtractionOptions, extract_layer
        from manyheads.study.execution.progress import announce

        start, processor = time.monotonic(), time.process_time()
        self._refuse()
        self._limits()  # refused before a checkpoint is read
        target = self._find()
        announce(f"querying {target.oracle.about}, tokens of dimension {target.oracle.dim}")
        try:
            same = {name: getattr(self, name) for name in ("accurate", "verify", "tolerance", "store")}
            options = ExtractionOptions(most_calls=self.budget, limits=self._limits(), **same)
            asked: dict[str, Any] = {"method": self.method, "noise": self.noise, "seed": self.seed}
            found = extract_layer(target.oracle, **asked, options=options)
        except KeyboardInterrupt:
            kept = "no answer is kept without --store FOLDER, and no file was written"
            if self.store is not None:
                kept = f"answers are kept in {self.store}; run the same command again to resume"
            raise KeyboardInterrupt(kept) from None
        taken = {"seconds": time.monotonic() - start, "cpu_seconds": time.process_time() - processor}
        summary = self._summarize(target, found, taken)
        self._write(target, found, summary)
        print(json.dumps(summary, indent=1) if self.json else wrap_output("\n".join(_as_text(summary))))
        return 0

    # Queries

    def _refuse(self) -> None:
        """Refuse before the first query what would be refused afterwards, such as files that another program wrote."""
        from manyheads.recovery.layers.files import is_layer_file

        if self.output.suffix != ".safetensors":
            raise UsageError(f"--output {self.output}: name a file that ends in .safetensors")
        folder, files = self.output.parent, [self.output.with_suffix(f".{name}") for name in FILES]
        taken = [file for file in files if file.exists()]
        refused = {
            f"there is no folder {folder}; make it first": not folder.is_dir(),
            f"the folder {folder} cannot be written; name another folder": not os.access(folder, os.W_OK | os.X_OK),
            "there is a folder of that name; name another file": any(file.is_dir() for file in files),
            "that is the layer that is queried; name another file": (
                self.output.exists() and os.path.realpath(self.output) == os.path.realpath(self.oracle)
            ),
        }
        if wrong := [why for why, is_wrong in refused.items() if is_wrong]:
            raise UsageError(f"--output {self.output}: {wrong[0]}")
        # Layer, certificate and report go together: beside no extracted layer the other two belong to another program.
        if taken and not is_layer_file(self.output):
            why = f"{taken[0]} exists and was not written by this command; name another file"
            raise UsageError(f"--output {self.output}: {why}")
        check_flags(self)

    def _find(self) -> Target:
        from manyheads.recovery import load_layer
        from manyheads.recovery.oracle.front_doors import open_oracle

        if not self.oracle:
            raise UsageError("ORACLE '': expected package.module:function, a saved layer, or a checkpoint folder")
        path = Path(self.oracle)
        if not path.exists():
            if ":" in self.oracle:
                return Target(self._import())
            raise UsageError(f"{self.oracle!r}: no such file or folder; give one, or package.module:function")
        if not path.is_dir():
            self._refuse_given(OF_CHECKPOINTS, f"for checkpoint folders only, which {self.oracle} is not")
        self._refuse_given(OF_FUNCTIONS, f"for functions only; {self.oracle} is read from its file")
        return self._open(path) if path.is_dir() else Target(open_oracle(path), lambda: load_layer(path))

    def _refuse_given(self, defaults: Mapping[str, object], why: str) -> None:
        if given := ", ".join(f"--{name}" for name, usual in defaults.items() if getattr(self, name) != usual):
            raise UsageError(f"{given}: {why}; leave it out")

    def _open(self, path: Path) -> Target:
        """Return a layer of a checkpoint folder."""
        from manyheads.recovery.oracle.checkpoint_layers import is_stored, true_layer
        from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

        if self.layer is None:
            raise UsageError(f"--layer is missing: give the number of a layer of {path}, from 0")
        number, through = self.layer, self.through
        oracle = checkpoint_oracle(path, number, through=through, dtype=self.dtype)
        return Target(oracle, (lambda: true_layer(path, number, through=through)) if is_stored(path) else None)

    def _import(self) -> "LayerOracle":
        """Return a function, or a module of PyTorch, with the properties that its attributes and the flags state."""
        from dataclasses import replace

        from manyheads.recovery.oracle.front_doors import is_module, open_oracle

        given = load_function(self.oracle)
        if not is_module(given):
            why = f"for checkpoint folders only, and for models, which {self.oracle} is not"
            self._refuse_given(OF_CHECKPOINTS, why)
            if self.dim is None and getattr(given, "dim", None) is None:
                raise UsageError(f"{self.oracle} has no attribute dim: give the token dimension with --dim")
        found = open_oracle(given, self.dim, self.layer, self.dtype, self.through)
        about = self.oracle if self.layer is None else f"layer {self.layer} of {self.oracle}"
        said = {name: getattr(self, name) or getattr(found, name) for name in ("residual", "rotary", "scores", "mlp")}
        return replace(found, **said, about=about)

    def _limits(self) -> "ServerLimits":
        from manyheads.recovery import ServerLimits

        table = None if self.vocabulary is None else _read_table(self.vocabulary)
        given = {name: getattr(self, name) for name in OF_SERVERS}
        return ServerLimits(1 if self.min_length is None else self.min_length, vocabulary=table, **given)

    # Results

    def _summarize(self, target: Target, found: "Recovery", taken: Mapping[str, float]) -> dict[str, Json]:
        """Return everything that is printed and kept, for JSON."""
        from manyheads.recovery.queries.leak_meter import measure_leak
        from manyheads.recovery.result.reports import summarize_recovery

        files = {name: str(self.output.with_suffix(f".{name}")) for name in FILES}
        said = {"oracle": target.oracle.about, "command": shlex.join(["manyheads", *sys.argv[1:]]), "seed": self.seed}
        truth = None if target.truth is None else target.truth()
        leak = {"leak": measure_leak(found, self.tolerance, self._limits())} if self.report else {}
        return {**said, **summarize_recovery(found, truth), **taken, **leak, "files": files}

    def _write(self, target: Target, found: "Recovery", summary: dict[str, Json]) -> None:
        from manyheads.recovery.result.reports import recovery_section
        from manyheads.study.reporting.html import write_report
        from manyheads.study.store.disk import write_json

        found.save(self.output, {"extracted from": target.oracle.about})
        write_json(Path(summary["files"]["json"]), summary)
        section = recovery_section(found, summary)
        write_report([section], Path(summary["files"]["html"]), "manyheads: an extracted layer", target.oracle.about)


def _read_table(path: Path) -> "np.ndarray":
    """Return the embeddings of a file; pickled objects are refused."""
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--vocabulary {path}: no array could be read ({error}); give a file .npy") from error
    if not isinstance(table, np.ndarray) or table.dtype.kind != "f":
        raise UsageError(f"--vocabulary {path}: give one array of floating-point embeddings (tokens, d)")
    return table


def _say_leak(leak: Mapping[str, Json] | None, stages: Mapping[str, Json]) -> Iterator[str]:
    """Describe the calls of every stage, and what is known of attacks behind noise and rounding."""
    from manyheads.recovery.queries.leak_meter import UNCOUNTED, describe_queries, describe_unmeasured, name_bound

    said = ", ".join(f"{name} {counts['calls']:,}" for name, counts in stages.items())
    yield f"stages   {said} calls"
    if leak is None:
        yield f"leak     {UNCOUNTED}"
        return
    calls = f"{leak['counting']:,.3g} calls of {leak['length']} tokens"
    yield f"counting {calls} show as many numbers as the layer has free parameters, {leak['parameters']:,}"
    yield f"leak     {describe_queries(leak)}"
    for one in leak["defences"]:
        cheapest = "no attack measured"
        if one["cheapest"] is not None:
            tokens = one["cheapest"] * leak["length"]
            cheapest = f"cheapest attack known {one['cheapest']:,.0f} calls, {tokens:,.0f} tokens"
        bound = f"{name_bound(one)} {one['bound']:,.0f} calls"
        yield f"         {one['name']}: {cheapest}; {bound}; squared error of an answer {one['loss']:.2g}"
    yield f"         {describe_unmeasured(leak)}"


def _as_text(summary: Mapping[str, Json]) -> Iterator[str]:
    """Format the result as lines of text."""
    from manyheads.recovery.layers.panels import say_ranks

    ranks = (say_ranks(summary[f"{name}_ranks"]) for name in ("theta", "projection"))
    errors = ([head[name] for head in summary["head_accuracy"]] for name in ("projection", "theta"))
    worst = [max(math.inf if error is None else float(error) for error in each) for each in errors]  # None: unbounded
    asked, files = summary["asked"], summary["files"]
    yield "heads    {}; rank of Theta {}, of W {}".format(summary["heads"], *ranks)
    yield f"acts on  {summary['acts_on']}"
    yield "each     factor of a whole head off by at most {:.2g} in W and {:.2g} in its logits".format(*worst)
    yield from (f"note     {note}" for note in summary["notes"])
    yield f"error    {summary['certificate']['statement']}"
    ratio = summary["numbers_per_parameter"]
    each = "" if ratio is None else f", {ratio:.3g} for each free parameter"
    yield f"asked    {asked['calls']:,} calls, {asked['tokens']:,} tokens; {asked['numbers']:,} numbers read{each}"
    processor = f"{summary['cpu_seconds']:.1f} CPU s, of which {asked['oracle_seconds']:.1f} in the oracle"
    yield f"took     {summary['seconds']:.1f} s; {processor}"
    yield f"method   {summary['method']}: {summary['reason']}"
    if known := summary["against_weights"]:
        yield f"truth    {', '.join(f'{name} {value:.2g}' for name, value in known.items())}"
    if "leak" in summary:
        yield from _say_leak(summary["leak"], summary["asked_by_stage"])
    yield f"written  {files['safetensors']}; its certificate {files['json']}; a report {files['html']}"
