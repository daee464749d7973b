"""The version of both halves, launcher and runtime."""

__version__ = "0.1.0"
