"""What runs in a Python of its own, beside a package that ttrl cannot share one with: files that are run by path."""
