"""Publication behind a claim: its BibTeX entry, and the theorem, equation or figure in it."""

import itertools
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args
from urllib.parse import quote

from manyheads.errors import UsageError

Kind = Literal["article", "inproceedings", "misc"]
_VENUE_FIELD = {"article": "journal", "inproceedings": "booktitle", "misc": "howpublished"}
_ARXIV = r"(?:\d{4}\.\d{4,5}|[a-z-]+(?:\.[A-Z]{2})?/\d{7})(?:v\d+)?"
_DOI = r"10\.\d{4,9}/\S+"


@dataclass(frozen=True)
class Source:
    """A publication and the place in it that a study puts to the test.

    Parameters
    ----------
    key
        BibTeX key, ASCII letters, digits and ``:_-``.
    title, authors, year
        As printed; `authors` in BibTeX order ("Given Family and Given Family").
    venue
        Journal, proceedings, place of publication, or "arXiv".
    identifier
        arXiv number ("2405.15712") or DOI ("10.1103/PhysRevB.24.2613"); empty for a book or lecture.
    locus
        Theorem, equation, figure or section, as the publication counts them. It is shown in tables and reports, and is
        no part of the BibTeX entry, which studies of the same publication share.
    kind
        Type of the BibTeX entry: "article", "inproceedings" or "misc" (preprint, book, lecture).
    volume, pages
        As printed; empty if unknown.

    Raises
    ------
    UsageError
        An entry of another type, a key, an identifier or a kind of another form, or text with unbalanced braces.

    Examples
    --------
    >>> from manyheads.study import Source
    >>> source = Source("vaswani2017", "Attention Is All You Need", "Ashish Vaswani and others", 2017,
    ...                 kind="inproceedings", venue="Advances in Neural Information Processing Systems", volume="30",
    ...                 identifier="1706.03762", locus="equation 1")
    >>> print(source.bibtex())
    @inproceedings{vaswani2017,
      title = {{Attention Is All You Need}},
      author = {Ashish Vaswani and others},
      year = {2017},
      booktitle = {Advances in Neural Information Processing Systems},
      volume = {30},
      eprint = {1706.03762},
      archivePrefix = {arXiv},
    }
    """

    key: str
    title: str
    authors: str
    year: int
    venue: str = "arXiv"
    identifier: str = ""
    locus: str = ""
    kind: Kind = "misc"
    volume: str = ""
    pages: str = ""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not (int if name == "year" else str):
                hint = '; write "Given Family and Given Family"' if name == "authors" else ""
                raise UsageError(f"{name}={value!r}: expected {'a year' if name == 'year' else 'a text'}{hint}")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9:_-]*", self.key):
            raise UsageError(f"a BibTeX key starts with a letter and holds letters, digits and ':_-'; got {self.key!r}")
        if self.kind not in get_args(Kind):
            raise UsageError(f"kind={self.kind!r}: choose from {', '.join(get_args(Kind))}")
        if self.identifier and not self._eprint() and not re.fullmatch(_DOI, self.identifier):
            wanted = "an arXiv number such as 2405.15712, or a DOI, which starts with '10.'"
            raise UsageError(f"identifier={self.identifier!r}: expected {wanted}; leave it empty if there is none")
        for name in ("title", "authors", "venue", "volume", "pages"):
            if not _balanced(text := getattr(self, name)):
                raise UsageError(f"{name}={text!r}: braces are unbalanced, which BibTeX cannot read")

    def at(self, locus: str) -> "Source":
        """Return the publication with a place in it."""
        return replace(self, locus=locus)

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        entries = {"title": f"{{{_escaped(self.title)}}}", "author": _escaped(self.authors), "year": str(self.year)}
        eprint = self._eprint()
        if not (eprint and self.kind == "misc"):  # the venue of a preprint is its archive
            entries[_VENUE_FIELD[self.kind]] = _escaped(self.venue)
        entries |= {"volume": _escaped(self.volume), "pages": _escaped(self.pages)}
        entries |= {"eprint": eprint, "archivePrefix": "arXiv"} if eprint else {"doi": self.identifier}
        lines = "".join(f"  {name} = {{{text}}},\n" for name, text in entries.items() if text)
        return f"@{self.kind}{{{self.key},\n{lines}}}"

    @property
    def url(self) -> str:
        """Return the address of the publication at arXiv or behind its DOI; empty if it has no identifier."""
        if number := self._eprint():
            return f"https://arxiv.org/abs/{number}"
        return f"https://doi.org/{quote(self.identifier)}" if self.identifier else ""

    def _eprint(self) -> str:
        """Return the arXiv number, with or without "arXiv:" before it; empty if the identifier is none."""
        number = self.identifier.removeprefix("arXiv:")
        return number if re.fullmatch(_ARXIV, number) else ""

    def __str__(self) -> str:
        """Return one line for a table: authors, title, venue, year and the place."""
        place = f", {self.locus}" if self.locus else ""
        return f"{self.authors}: {self.title}. {self.venue}, {self.year}{place}"


def _escaped(text: str) -> str:
    """Escape what LaTeX reads as a command, a comment or an alignment, unless it is escaped already."""
    return re.sub(r"(?<!\\)([&%$#_])", r"\\\1", text)


def _balanced(text: str) -> bool:
    """Return whether every brace is closed, as BibTeX counts (backslashes do not matter)."""
    depths = list(itertools.accumulate((letter == "{") - (letter == "}") for letter in text))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)
