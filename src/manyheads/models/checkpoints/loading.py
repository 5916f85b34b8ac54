"""Models of transformers loaded from a checkpoint folder: nothing fetched, nothing unpickled, no code of the folder."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyheads._extras import require
from manyheads.models.refusals import ConfigInvalid, FileMissing, WeightsMismatch, shorten


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing bars and warning of unused heads; what it was set to is put back."""
    logging: Any = require("transformers").utils.logging
    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()


def load_model(folder: Path | str, dtype: str = "auto") -> Any:
    """Load the model of a checkpoint folder in evaluation mode, with weights in `dtype` ("auto": as stored).

    Its class is the one in `architectures`, which gives modules the names that they had in training; without one, the
    model without a head.
    """
    torch, transformers = require("torch"), require("transformers")
    if not (Path(folder) / "config.json").is_file():
        raise FileMissing(folder, "holds no config.json", "give the folder that model.save_pretrained wrote")
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigInvalid(folder, f"transformers cannot read config.json ({str(error)[:200]})") from error
        model, report = class_of(config).from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
        )
    if absent := sorted({*report["missing_keys"], *(str(key[0]) for key in report["mismatched_keys"])}):
        what = f"lacks {len(absent)} weights of {type(model).__name__}, which would be random: {shorten(absent)}"
        raise WeightsMismatch(folder, what)
    return model.eval()


def class_of(config: Any) -> Any:
    """Return the class of transformers that a configuration names, or the one that finds a class by the model type."""
    transformers = require("transformers")
    for name in config.architectures or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    return transformers.AutoModel
