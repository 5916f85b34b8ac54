"""The recorder on a tiny model of every family of the table: statistics of plain attention, or a refusal by name."""

import sys

import pytest
from tests.models import tiny
from tests.models.tools import OWN_ATTENTION, SINK_APART, verdicts
from tests.probe.families import double, eager_patterns, run
from tests.probe.test_families import compare

from manyheads.errors import UsageError
from manyheads.models.families import FAMILIES
from manyheads.probe import record_attention

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def model_and_batch(family, seed):
    """Return a random model with sharp attention, in double precision, and a batch of two sequences."""
    import torch

    torch.manual_seed(seed)
    sizes = {"heads": 4, "width": 32} if family == "codegen" else {}
    model = tiny.build(family, **sizes).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor.mul_(3.0)
    generator = torch.Generator().manual_seed(seed)
    if getattr(model.config, "image_size", None):
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(2, 29, (2, 12), generator=generator)}
    return double(model, inputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_the_recorder_does(family, seed):
    import torch

    model, inputs = model_and_batch(family, seed)
    if family in OWN_ATTENTION:
        assert verdicts(family)[0]["probe"] == "refused"
        if "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__]):
            pytest.skip(f"transformers computes {family} through the interface in this version")
        with pytest.raises(UsageError, match="computes its attention outside"), record_attention(model):
            pass
        return
    torch.manual_seed(seed)  # of the patches that a masked autoencoder hides
    before = run(model, inputs)
    torch.manual_seed(seed)
    with record_attention(model, rows=64) as record:
        assert torch.equal(before, run(model, inputs))
    found = record.dataset()
    if family in SINK_APART:
        assert verdicts(family)[0]["probe"] == "no reference"
        assert float(found["sink_mass"].min()) > 0
        return
    assert verdicts(family)[0]["probe"] == "supported"
    torch.manual_seed(seed)
    patterns = eager_patterns(model, inputs, set(found.module.values))
    assert len(patterns) == 2
    assert max(compare(found, patterns, inputs).values()) < 1e-5
