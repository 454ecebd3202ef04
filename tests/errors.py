"""Errors by their whole text."""

import re

import pytest


def raises(error, text):
    """As ``pytest.raises``, where the message is ``text`` and nothing else."""
    return pytest.raises(error, match=f"^{re.escape(text)}$")
