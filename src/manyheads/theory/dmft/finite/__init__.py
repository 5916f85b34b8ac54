"""Networks of finite size beside the limits, and the forecast from both."""
