from .text import trained_model as trained_model
