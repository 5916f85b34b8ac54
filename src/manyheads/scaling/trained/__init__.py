"""Transformers of finite size, trained under a parametrization."""
