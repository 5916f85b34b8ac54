"""Where a claim comes from: a paper and the theorem, equation or figure in it."""

import re
from dataclasses import dataclass

from manyheads.errors import UsageError


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
        Journal, conference or "arXiv".
    identifier
        arXiv number ("2405.15712") or DOI; empty for a book or lecture.
    locus
        Theorem, equation, figure or section, as the publication counts them.

    Examples
    --------
    >>> from manyheads.study import Source
    >>> source = Source("vaswani2017", "Attention Is All You Need", "Ashish Vaswani and others", 2017,
    ...                 venue="NeurIPS", identifier="1706.03762", locus="equation 1")
    >>> print(source.bibtex())
    @misc{vaswani2017,
      title = {Attention Is All You Need},
      author = {Ashish Vaswani and others},
      year = {2017},
      howpublished = {NeurIPS},
      eprint = {1706.03762},
      archiveprefix = {arXiv},
      note = {equation 1},
    }
    """

    key: str
    title: str
    authors: str
    year: int
    venue: str = "arXiv"
    identifier: str = ""
    locus: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9:_-]*", self.key):
            raise UsageError(f"a BibTeX key starts with a letter and holds letters, digits and ':_-'; got {self.key!r}")

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        entries = {
            "title": self.title,
            "author": self.authors,
            "year": str(self.year),
            "howpublished": self.venue,
        }
        if re.fullmatch(r"\d{4}\.\d{4,5}", self.identifier):
            entries |= {"eprint": self.identifier, "archiveprefix": "arXiv"}
        elif self.identifier:
            entries["doi"] = self.identifier
        if self.locus:
            entries["note"] = self.locus
        lines = "".join(f"  {name} = {{{text}}},\n" for name, text in entries.items())
        return f"@misc{{{self.key},\n{lines}}}"

    def __str__(self) -> str:
        """Return one line for a table: authors, title, venue, year and the place."""
        place = f", {self.locus}" if self.locus else ""
        return f"{self.authors}: {self.title}. {self.venue}, {self.year}{place}"
