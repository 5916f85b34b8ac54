from .instances import parity_layer as parity_layer
from .instances import wave_layer as wave_layer
