"""One small transformer through everything: what `manyheads demo` runs."""
