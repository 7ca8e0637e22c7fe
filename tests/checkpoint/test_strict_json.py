"""JSON from strangers: what the standard parser lets through is refused, and the rest is read as it reads it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.checkpoint.schema import parse_object

REFUSED = {
    "a list": (b"[1]", "not a JSON object"),
    "nothing": (b"", "Expecting value"),
    "more than one": (b"{} {}", "Extra data"),
    "a name twice": (b'{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' occurs twice"),
    "a name twice, inside": (b'{"a": [{"b": 1, "b": 1}]}', "'b' occurs twice"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "minus infinity": (b'{"a": -Infinity}', "Infinity"),
    "infinity by overflow": (b'{"a": 1e999}', "1e999"),
    "a number beyond 64 bits": (b'{"a": 1' + b"0" * 21 + b"}", "22 digits"),
    "a long number": (b'{"a": ' + b"1" * 5000 + b"}", "5000 digits"),
    "half a surrogate pair": (b'{"a": "\\udc00"}', "surrogate pair"),
    "half a surrogate pair in a name": (b'{"\\ud800": 1}', "surrogate pair"),
    "Latin-1": (b'{"a": "\xe9"}', "utf-8"),
    "deep": (b'{"a":' * 100_000, "deep"),
}


@pytest.mark.parametrize("text, phrase", REFUSED.values(), ids=REFUSED)
def test_what_readers_disagree_on_is_refused(text, phrase):
    with pytest.raises(ValueError, match=phrase) as caught:
        parse_object(text)
    str(caught.value).encode()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans())
def test_a_sound_object_is_read_as_it_was_written(value, ascii_only):
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value
