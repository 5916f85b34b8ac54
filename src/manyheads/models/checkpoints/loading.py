"""Models of transformers loaded from a checkpoint folder: nothing fetched, nothing unpickled, no code of the folder.

Models without memory, on the meta device, are made from a configuration alone.
"""

import contextlib
from collections.abc import Iterator, Mapping
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


def make_model(raw: Mapping[str, Any], language: bool, length: int, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers on the meta device, by `language` with that head, and a batch of it."""
    torch, transformers = require("torch"), require("transformers")
    with quiet_transformers(), torch.device("meta"):
        given = transformers.AutoConfig.for_model(**raw)
        kind = class_of(given)
        if kind is transformers.AutoModel and language and type(given) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            kind = transformers.AutoModelForCausalLM
        model = (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(given).eval()
    if "pixel_values" in model.main_input_name:
        size = getattr(given, "image_size", 224)
        sides = size if isinstance(size, list) else (size, size)
        return model, {"pixel_values": torch.zeros(batch, given.num_channels, *sides)}
    token = next(each for each in range(1, 3) if each != getattr(given, "pad_token_id", None))
    cached = {"use_cache": False} if hasattr(given, "use_cache") else {}
    return model, {"input_ids": torch.full((batch, length), token)} | cached
