"""What each tool does with a family of the table: supported, refused or without reference, by the table's own data."""

from functools import cache

from tests.models import tiny

from manyheads.errors import UsageError
from manyheads.models.architecture import read_body
from manyheads.models.attention_layers import attention_config
from manyheads.models.config import read_config
from manyheads.models.families import FAMILIES
from manyheads.models.refusals import CheckpointRefused, NotExtractable

TOOLS = ("count", "scale", "audit", "probe", "extract")
WORDS = ("supported", "refused", "degraded", "no reference")
NO_STD = "its configuration does not say at which std its weights start"
OUTSIDE = "its attention is computed outside of the interface of transformers"
# Families whose attention no function of the interface computes, at the pinned version of transformers.
OWN_ATTENTION = ()


@cache
def verdicts(family):
    """Return tool → word, and tool → reason of what is not supported."""
    raw = {"model_type": family, **tiny.settings(family)}
    reasons = {}
    try:
        read_body(raw)
    except UsageError as error:
        reasons["scale"] = reasons["audit"] = str(error)
    if not FAMILIES[family].plain_start:
        reasons.setdefault("audit", NO_STD)
    if family in OWN_ATTENTION:
        reasons["probe"] = OUTSIDE
    try:
        attention_config(read_config(raw), 0)
    except (CheckpointRefused, NotExtractable) as error:
        reasons["extract"] = getattr(error, "found", str(error))
    return {tool: "refused" if tool in reasons else "supported" for tool in TOOLS}, reasons


EXTRACTED = tuple(family for family in FAMILIES if verdicts(family)[0]["extract"] == "supported")
