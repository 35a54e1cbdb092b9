"""The version of ttrl, in a file of its own: everything may import it, and the build reads it."""

__version__ = "0.1.0"
