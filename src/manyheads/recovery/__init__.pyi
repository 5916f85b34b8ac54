# lazy_loader reads a stub of relative imports only.
from .examples.learning import LearningOptions as LearningOptions
from .examples.learning import learn_layer as learn_layer
from .layers.evaluation import evaluate_layer as evaluate_layer
from .layers.files import load_layer as load_layer
from .layers.files import save_layer as save_layer
from .layers.matching import compare_layers as compare_layers
from .layers.rotary import RotaryLayer as RotaryLayer
from .oracle.limits import ServerLimits as ServerLimits
from .planted.diagnostics import assumptions as assumptions
from .planted.hard_instances import parity_layer as parity_layer
from .planted.task import gpt_layer as gpt_layer
from .planted.task import planted_layer as planted_layer
from .planted.task import sequences as sequences
from .queries.extraction import extract_layer as extract_layer
from .queries.options import ExtractionOptions as ExtractionOptions
from .refusals import RecoveryRefused as RecoveryRefused
from .result.results import Recovery as Recovery
