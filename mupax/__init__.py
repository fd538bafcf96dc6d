"""mupax: transformers in JAX whose hyperparameters carry over from small to large."""

from __future__ import annotations

__version__ = "0.1.0"
