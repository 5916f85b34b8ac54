"""One small training of the demo's transformer for all chapters that read it."""

import pytest

from manyheads.demo.text import TextTraining
from manyheads.study import run


@pytest.fixture(scope="session")
def trained(tmp_path_factory, seed):
    """Return the run of three small transformers."""
    return run(TextTraining.small(), 3, seed, store=tmp_path_factory.mktemp("runs"), progress=False)
