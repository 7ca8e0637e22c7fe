"""A tiny Kimi-K2: config, tokenizer, text, training; the basis of the demo and the tests."""

from .. import _callable

_callable(__name__)
