"""A tiny Kimi-K2: config, tokenizer, text, training; what the demo and the tests stand on."""

from .. import _callable

_callable(__name__)
