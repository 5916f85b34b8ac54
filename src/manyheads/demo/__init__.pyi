from .chapters import CHAPTERS as CHAPTERS
from .chapters import Chapter as Chapter
from .chapters import Scene as Scene
from .text import TextTraining as TextTraining
