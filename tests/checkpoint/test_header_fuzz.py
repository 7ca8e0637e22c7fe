"""Headers changed at random: what is accepted is what the safetensors library reads."""

import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from support.heads import DATA, GOOD, write_raw

from kconv.checkpoint.header import build_header, read_header
from kconv.errors import CorruptHeader, NotACheckpoint


def _library(file):
    """Return what the safetensors library reads: names with dtype and shape, or None where it refuses."""
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError:
        return None


def _ours(file):
    """Return the same from kconv, or None where it refuses; any other exception is a fault of kconv's."""
    try:
        return {name: (info.dtype, info.shape) for name, info in read_header(file).items()}
    except (CorruptHeader, NotACheckpoint) as fault:
        str(fault).encode()
        return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3) | st.just("U8"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


@FUZZ
@given(data=st.data())
def test_a_header_with_any_value_changed_is_refused_or_read_as_the_library_does(tmp_path, data):
    header = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from([path for path in _paths(header) if path]))
        place = header
        for key in parents:
            place = place[key]
        if isinstance(place, dict) and data.draw(st.booleans()):
            place[data.draw(st.text(max_size=4))] = place.pop(last)
        else:
            near = [st.just(place[last] + step) for step in (-1, 1)] if type(place[last]) is int else []
            place[last] = data.draw(st.one_of(JSON, *near))
    file = write_raw(tmp_path / "m.safetensors", header, DATA)
    ours = _ours(file)
    assert ours is None or ours == _library(file)


@FUZZ
@given(at=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(-8, 8))
def test_a_file_with_a_byte_changed_or_the_end_cut_is_refused_or_read_as_the_library_does(tmp_path, at, byte, cut):
    file = write_raw(tmp_path / "m.safetensors", GOOD, DATA)
    content = bytearray(file.read_bytes())
    content[at % len(content)] = byte
    file.write_bytes(content[:cut] if cut < 0 else content + b"\0" * cut)
    ours = _ours(file)
    assert ours is None or ours == _library(file)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(["U8", "BF16", "F32", "I64"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_a_built_header_is_read_alike_by_the_library(tmp_path, tensors):
    entries = [(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    head = build_header(entries, {"format": "pt"})
    size = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8}
    total = 0
    for _, dtype, shape in entries:
        count = size[dtype]
        for dim in shape:
            count *= dim
        total += count
    file = tmp_path / "m.safetensors"
    file.write_bytes(head + b"\0" * total)
    assert len(head) % 8 == 0
    expected = {name: (dtype, shape) for name, dtype, shape in entries}
    assert _ours(file) == _library(file) == expected
