"""Studies of wide layers and of small transformers on text, images and hierarchies."""
