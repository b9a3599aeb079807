"""Analytical performance model of large-language-model inference."""

__version__ = "0.1.0"
