"""A tiny Kimi-K2: config, tokenizer, text, training; the basis of the demo and the tests."""

from ..functions import make_callable

make_callable(__name__)
