from .text import TextTraining as TextTraining
from .text import trained_model as trained_model
