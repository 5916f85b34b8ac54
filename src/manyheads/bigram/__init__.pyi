from . import theory as theory
