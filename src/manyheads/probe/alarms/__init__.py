"""Alarms over the curves of a training: sudden changes, levels from clean runs, fixed bounds."""
