"""Verification of a checkpoint series, before any trajectory is drawn.

Every tensor is read twice, by blocks. First by itself: sha256 of its bytes, entries that are not finite, and a sample
of entries at places that are the same in every checkpoint, which gives the distances between checkpoints and between
tensors. Then beside the same tensor of its neighbours, entry by entry.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import Figure
from manyheads._overview import Overview, Shown, distinct_texts
from manyheads.errors import UsageError
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.refusals import CheckpointRefused, shorten
from manyheads.probe.checkpoints import copies
from manyheads.probe.checkpoints.alterations.comparison import compare_with
from manyheads.probe.checkpoints.alterations.detection import find_alterations, note_unchecked
from manyheads.probe.checkpoints.contents import SAMPLE, Contents, Finding, Notes, digest_contents, read_contents
from manyheads.probe.checkpoints.folder import check_folder
from manyheads.probe.checkpoints.series import Source, as_checkpoint, path_of, read_order

# Sampled entries from which the order of a single shard is told: with fewer, distances that are equal differ by chance.
OF_SHARD = 8 * SAMPLE
# Keys of a configuration that say nothing of the model or are seen in the weights.
PASSING_KEYS = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """What `verify_checkpoints` found."""

    checkpoints: tuple[str, ...]  # names, in the order in which they were compared
    findings: tuple[Finding, ...]  # what is wrong, empty for a series that is what it says
    compared: int  # number of checkpoints that could be read whole
    tensors: int  # number of tensors that were read, over all checkpoints
    unchecked: tuple[str, ...]  # what was not checked, and why
    sha256: Mapping[str, str]  # name of every readable checkpoint -> digest of the names and bytes of its tensors

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready dictionary."""
        return {**asdict(self), "passed": self.passed}

    def plot(self) -> "Figure":
        """Draw the number of findings of every kind."""
        from manyheads.study.reporting.charts import draw_bars

        kinds = Counter(each.kind for each in self.findings).most_common()
        return draw_bars(self._overview().title, "findings", kinds or [("no finding", 0)])

    def _overview(self) -> Overview:
        rows = [(each.kind, each.where, each.what, each.evidence) for each in self.findings]
        title = f"Verification: {len(self.checkpoints)} checkpoints, {self.compared} readable, {len(rows)} findings"
        notes = tuple(f"not checked: {text}" for text in self.unchecked)
        return Overview(title, ("kind", "where", "what", "evidence"), rows, notes)

    def __str__(self) -> str:
        head = f"{len(self.checkpoints)} checkpoints, {self.compared} readable, {self.tensors:,} tensors read: "
        lines = [f"  {each.where}: {each.what} [{each.kind}]\n      {each.evidence}" for each in self.findings]
        return "\n".join(
            [f"{head}{len(lines)} findings", *lines, *(f"  not checked: {text}" for text in self.unchecked)]
        )


@np.errstate(over="ignore", invalid="ignore")  # damaged weights hold anything
def verify_checkpoints(
    checkpoints: Sequence[Source], *, against: Source | Sequence[Source] | None = None, follow_links: bool = False
) -> Verification:
    """Check whether a checkpoint series is what it says.

    * Files: missing shards, truncated or damaged files, pickles, shards that contradict their index.
    * Configuration and weights that do not belong together, or a configuration that changes along the series.
    * Tensors that appear or vanish, and changed dtypes or shapes.
    * Entries that are NaN or infinite.
    * Duplicates: the weights of another step (sha256, or equal when rounded); tensors that change and come back to the
      bytes of another step; values of a narrower type than the one that holds them, or of int8.
    * Steps: one step twice, a trainer's state that gives another step than the folder's name, and an order of the
      weights, or of those in one shard, other than that of the steps, see
      `manyheads.probe.checkpoints.copies`.
    * Matrices of one shape that are interchanged from one step to the next.
    * Tensors, vectors too, and single entries with changes atypical of training: negated, zeroed, shifted,
      scaled, transposed, rows or columns in another order, a jump that comes from one bit of the exponent; see
      `manyheads.probe.checkpoints.alterations.detection`.
    * A tokenizer that differs from that of most steps, or has more ids than embeddings.

    Parameters
    ----------
    checkpoints
        Files, folders or opened checkpoints. Where every name holds a step (`step1000`, `checkpoint-500`) they are
        compared in the order of the steps, otherwise in the order given.
    against
        A reference checkpoint, or several, matched by step: every tensor that differs is named, with an explanation of
        the difference where one is found.
    follow_links
        Whether files may be symbolic links, as in a Hugging Face cache.

    Returns
    -------
    Verification
        A checkpoint that cannot be read is a finding, and the others are compared without it.

    Notes
    -----
    The order is read from the weights, so it needs four checkpoints, and it cannot be told from its reverse or in a
    stationary phase. A checkpoint of another run at either end looks like a long step. An alteration is found if it is
    large beside the changes between neighbours. An entry that one bit of the exponent shrinks changes by its own size
    at most: in the first and last checkpoint it is found where this is 10 times the RMS change of its row and column
    (30 times for vectors); `unchecked` has the share of entries that are smaller.

    Examples
    --------
    >>> import tempfile, safetensors.numpy
    >>> folder = Path(tempfile.mkdtemp())
    >>> weights = {"w": np.random.default_rng(0).normal(size=(8, 8))}
    >>> for step in (1, 2):
    ...     safetensors.numpy.save_file(weights, folder / f"step{step}.safetensors")
    >>> [finding.kind for finding in verify_checkpoints(sorted(folder.iterdir())).findings]
    ['duplicate']
    """
    sources = list(checkpoints)
    if isinstance(checkpoints, str) or not sources:
        raise UsageError("expected a list of checkpoints: files, folders or opened checkpoints")
    findings: list[Finding] = []
    unchecked: Notes = {}
    order = read_order(sources)
    names = _names([path_of(source) for source in order.sources])
    steps = dict(zip(names, order.steps, strict=True)) if order.steps else {}
    if order.conflict is not None:
        *pair, why = order.conflict
        where = ", ".join(names[order.sources.index(each)] for each in pair)
        findings.append(Finding("step", where, "the names do not say which is later", why))
    opened: dict[str, Checkpoint] = {}
    contents = []
    for name, source in zip(names, order.sources, strict=True):
        try:
            opened[name] = as_checkpoint(source, follow_links)
            contents.append(read_contents(name, opened[name], findings, unchecked))
            findings += check_folder(contents[-1], opened[name].path, unchecked)
            contents[-1].step = steps.get(name, contents[-1].step)
        except CheckpointRefused as refusal:
            findings.append(Finding("file", name, type(refusal).__name__, str(refusal)))
    digests = {content.name: digest_contents(content) for content in contents}
    readable, read = len(contents), sum(len(content.hashes) for content in contents)
    if against is not None:
        findings += compare_with(against, contents, opened, unchecked, follow_links)
    findings += _compare_tables(contents)
    findings += copies.find_copies(contents) + copies.find_rounded(contents, unchecked)
    copied, partial = copies.find_partial_copies(contents)
    moved, interchanged = copies.find_interchanged(contents)
    odd, misplaced = _find_steps(contents, partial | moved)
    findings += copied + interchanged + misplaced
    ordered = [content for content in contents if content.name not in odd]
    alterations, altered = find_alterations(ordered, opened, partial | moved)
    findings += alterations + copies.find_partial_copies(ordered, altered)[0]
    if order.steps is None and order.conflict is None:
        unchecked["steps", "not every name holds one, such as step1000 or checkpoint-500"] = []
    note_unchecked(ordered, against is not None, unchecked)
    return Verification(tuple(names), tuple(findings), readable, read, _as_text(unchecked, readable), digests)


def _as_text(unchecked: Notes, readable: int) -> tuple[str, ...]:
    """Format the omitted checks with their reasons; checkpoints are named unless all are concerned."""
    return tuple(
        f"{what}{f' of {shorten(names)}' if 0 < len(names) < readable else ''}: {why}"
        for (what, why), names in unchecked.items()
    )


def _names(paths: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({place})" for place, path in enumerate(paths)]


def _compare_tables(contents: list[Contents]) -> list[Finding]:
    """Compare names, dtypes, shapes and configurations with those of most checkpoints."""
    findings: list[Finding] = []
    if not contents:
        return findings
    usual = _most_frequent([frozenset(content.entries) for content in contents])
    for content in contents:
        for verb, names in (("lacks", usual - content.entries.keys()), ("also holds", content.entries.keys() - usual)):
            if names:
                what = f"{verb} {len(names)} tensors against most of the series"
                findings.append(Finding("tensors", content.name, what, shorten(sorted(names))))
    for kind in ("dtype", "shape"):
        held = [{name: getattr(entry, kind) for name, entry in each.entries.items()} for each in contents]
        common = {name: _most_frequent([each[name] for each in held if name in each]) for name in sorted(usual)}
        for content, own in zip(contents, held, strict=True):
            if texts := _deviations(own, {name: value for name, value in common.items() if name in own}):
                what = f"{kind} of {len(texts)} of {len(usual)} tensors is not that of most of the series"
                findings.append(Finding(kind, content.name, what, shorten(texts)))
    other, tokenizers = "is not that of most of the series", [each.tokenizer for each in contents if each.tokenizer]
    for content in contents:
        if content.tokenizer and content.tokenizer != _most_frequent(tokenizers):
            what = f"the tokenizer {other}"
            findings.append(Finding("tokenizer", content.name, what, "vocabulary and merges differ"))
    configs = ((each.config or {}).items() for each in contents)
    tables = [json.dumps({key: v for key, v in each if key not in PASSING_KEYS}, sort_keys=True) for each in configs]
    most = json.loads(_most_frequent(tables))
    for content, table in zip(contents, map(json.loads, tables), strict=True):
        if texts := _deviations(table, dict.fromkeys(sorted(table.keys() | most.keys())) | most):
            findings.append(Finding("configuration", content.name, f"the configuration {other}", shorten(texts)))
    return findings


def _deviations(own: Mapping[str, object], usual: Mapping[str, object]) -> list[str]:
    return [f"{key}: {own.get(key)}, usually {value}" for key, value in usual.items() if own.get(key) != value]


def _most_frequent(values: list[Any]) -> Any:
    """Return the most frequent value, the first of them on a tie."""
    return max(dict.fromkeys(values), key=values.count)


def _find_steps(contents: list[Contents], doubtful: set[str]) -> tuple[set[str], list[Finding]]:
    """Find steps that occur twice, and an order of the weights, but for doubtful ones, that is not the stated one.

    The checkpoints that are out of order are returned too.
    """
    by_step: dict[int, list[str]] = defaultdict(list)
    for content in contents:
        if content.step is not None:
            by_step[content.step].append(content.name)
    twice = ((step, each) for step, each in by_step.items() if len(each) > 1)
    findings = [Finding("step", ", ".join(each), f"step {s} occurs {len(each)} times", "names") for s, each in twice]
    shapes = {
        name: {each.entries[name].shape if name in each.samples else () for each in contents}
        for name in (contents[0].samples if contents else ())
        if name not in doubtful
    }
    common = [name for name, held in shapes.items() if len(held) == 1 and len(next(iter(held))) > 1]
    usable = [each for each in contents if all(np.isfinite(each.samples[name]).all() for name in common)]
    if len(usable) < 4 or not common:
        return set(), findings
    if misplaced := list(_describe_misplaced(usable, common, "")):
        return {name for each in misplaced for name in each.where.split(", ")}, findings + misplaced
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in common:
        by_file[usable[0].files[name]].append(name)
    for file, names in by_file.items():
        if len(by_file) > 1 and sum(usable[0].samples[name].size for name in names) >= OF_SHARD:
            findings += _describe_misplaced(usable, names, f", {file}")
    return set(), findings


def _describe_misplaced(usable: list[Contents], names: list[str], of: str) -> Iterator[Finding]:
    """Find checkpoints that are out of order by some of their matrices; `of` says by which."""
    distances = _distances(usable, names)
    for each in [] if distances is None else copies.find_misplaced(distances):
        named = [usable[place].name if place >= 0 else "" for place in each.places]
        before, after = distinct_texts(each.before, each.after)
        evidence = f"distances around it: {before} in the stated order, {after} otherwise"
        where, kind, what = named[0], "order", "the two are interchanged"
        match each.kind:
            case "interchanged":
                where = f"{named[0]}, {named[1]}"
            case "misplaced":
                what = f"by its weights it {f'follows {named[1]}' if named[1] else 'comes first'}"
            case _:
                kind, what = "apart", "lies far from its neighbours and all others"
                evidence = f"distance through it {before}, past it {after}"
        yield Finding(kind, f"{where}{of}", what, evidence)


def _distances(contents: list[Contents], names: list[str]) -> NDArray[np.float64] | None:
    """Return the distances between checkpoints, the median over matrices of each in units of its own median."""
    found = []
    for name in names:
        points = np.array([each.samples[name] for each in contents], np.float64)
        points -= points.mean(axis=0)
        squares = np.sum(points**2, axis=1)
        distances = np.sqrt(np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0.0))
        if unit := float(np.median(distances[np.triu_indices(len(contents), 1)])):
            found.append(distances / unit)
    return np.median(found, axis=0) if found else None
