"""Models of transformers without memory, for `manyheads count config.json --traced`."""

from typing import Any


def make_model(config: Any, length: int, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return the model of transformers on the meta device, and a batch of images or of tokens that are no padding."""
    from manyheads._extras import require
    from manyheads.models.checkpoints.loading import class_of, quiet_transformers
    from manyheads.models.families.heads import has_language_head

    torch, transformers = require("torch"), require("transformers")
    with quiet_transformers(), torch.device("meta"):
        given = transformers.AutoConfig.for_model(**config.raw)
        kind = class_of(given)
        if kind is transformers.AutoModel and has_language_head(config):
            kind = transformers.AutoModelForCausalLM
        model = (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(given).eval()
    if "pixel_values" in model.main_input_name:
        size = given.image_size
        return model, {"pixel_values": torch.zeros(batch, given.num_channels, size, size)}
    token = next(each for each in range(1, 3) if each != getattr(given, "pad_token_id", None))
    cached = {"use_cache": False} if hasattr(given, "use_cache") else {}
    return model, {"input_ids": torch.full((batch, length), token)} | cached
