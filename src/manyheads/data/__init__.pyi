from .digits import load_digits as load_digits
from .texts import load_text as load_text
from .windows import TextWindows as TextWindows
