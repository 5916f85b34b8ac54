from .task import JomaTask as JomaTask
from .task import UpdateRule as UpdateRule
from .task import draw_joma_task as draw_joma_task
