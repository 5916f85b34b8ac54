"""Networks of finite size as they are trained."""
