from .characters import load_text as load_text
from .digits import load_digits as load_digits
from .windows import TextWindows as TextWindows
