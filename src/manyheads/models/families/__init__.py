"""Model families as data: modules, the roles and layouts of their tensors, and the keys of their configurations.

A module of sort "linear" holds `<path>.weight` and perhaps `<path>.bias`; which of them have to be there follows from
the configuration, so that a checkpoint is explained completely or refused.

Source of names, keys and defaults: the model classes of Hugging Face transformers (4.57 to 5.23), as they are saved.
"""

import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from manyheads.models.families import encoders, experts, gated, plain, vision
from manyheads.models.families.derived import DERIVED
from manyheads.models.modules import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in chain(*(vars(table).values() for table in (plain, gated, experts, encoders, vision)), DERIVED)
    if isinstance(family, Family)
}
"""The known families by the `model_type` of their configuration."""

UNSUPPORTED: Mapping[str, str] = {
    name: reason
    for reason, names in tomllib.loads(Path(__file__).with_name("unsupported.toml").read_text("utf-8")).items()
    for name in names.split()
}
"""Model types without a table, and why."""
