"""Draft heads of any dims, for property tests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kconv.drafters.spec import Gqa, HeadSpec, Linear, Llama3, Mla, Norms, Rope, Tokens, Yarn

_DIM = st.integers(1, 12)
_EVEN = st.integers(1, 4).map(lambda half: 2 * half)
_POSITIVE = st.floats(1e-3, 1e6, allow_nan=False)
_TOKEN = st.none() | st.integers(0, 200_000)

mla = st.builds(Mla, _DIM, _DIM, _DIM, _DIM, _EVEN, _DIM)
gqa = st.builds(
    lambda kv_heads, groups, head_dim, bias: Gqa(kv_heads * groups, kv_heads, head_dim, bias),
    st.integers(1, 3),
    st.integers(1, 3),
    _EVEN,
    st.booleans(),
)
# What fast dims are is above what slow ones are.
yarn = st.builds(
    lambda factor, original, betas, *rest: Yarn(factor, original, max(betas), min(betas), *rest),
    _POSITIVE,
    st.integers(1, 100_000),
    st.tuples(_POSITIVE, _POSITIVE),
    st.none() | _POSITIVE | st.just(0.0),
    st.none() | _POSITIVE | st.just(0.0),
    st.none() | _POSITIVE,
)
llama3 = st.builds(Llama3, _POSITIVE, _POSITIVE, _POSITIVE, st.integers(1, 100_000))
scalings = st.none() | yarn | llama3 | st.builds(Linear, _POSITIVE)
_THETA = st.floats(100.0, 1e9)
ropes = st.builds(Rope, _THETA, scalings)
# What every engine reads as the trainer does: both values of DeepSeek's or neither, and no attention_factor.
settled_yarn = st.builds(
    lambda scaling, both: replace(scaling, mscale=both[0], mscale_all_dim=both[1], attention_factor=None),
    yarn,
    st.just((None, None)) | st.tuples(_POSITIVE, _POSITIVE),
)
mla_ropes = st.builds(Rope, _THETA, st.none() | settled_yarn)
gqa_ropes = st.builds(Rope, _THETA, st.none() | settled_yarn | llama3 | st.builds(Linear, _POSITIVE))
partial_ropes = st.builds(Rope, _THETA, scalings, st.sampled_from([1.0, 0.5, 0.25]))


@st.composite
def uneven_specs(draw: st.DrawFn) -> HeadSpec:
    """A head of one or two layers whose attention is not as wide as its hidden state, with fewer key-value heads."""
    kv_heads, groups, head_dim = draw(st.integers(1, 3)), draw(st.integers(2, 3)), draw(_EVEN)
    attention = draw(mla) if draw(st.booleans()) else Gqa(kv_heads * groups, kv_heads, head_dim)
    is_mla = isinstance(attention, Mla)
    width = attention.heads * (attention.v_head_dim if is_mla else head_dim)
    hidden, vocab = draw(_DIM.filter(lambda dim: dim != width)), draw(st.integers(2, 24))
    return HeadSpec(
        attention=attention,
        hidden=hidden,
        target_hidden=draw(st.sampled_from([hidden, hidden + 1])),
        intermediate=draw(_DIM),
        layers=draw(st.integers(1, 2)),
        vocab=vocab,
        draft_vocab=draw(st.sampled_from([vocab, vocab - 1, 1])),
        rope=draw(mla_ropes if is_mla else gqa_ropes),
        captured=tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=4)))),
        eps=1e-5,
        dtype=draw(st.sampled_from(["BF16", "F16", "F32"])),
        max_positions=draw(st.integers(8, 262144)),
        norms=draw(st.sampled_from([Norms(), Norms(fc=True), Norms(output=True), Norms(before_fc=True)])),
    )


@st.composite
def portable_specs(draw: st.DrawFn) -> HeadSpec:
    """A head that TensorRT-LLM and vLLM can both hold; the width of its attention is not its hidden width."""
    is_mla = draw(st.booleans())
    hidden, vocab = draw(_DIM), draw(st.integers(2, 24))
    norms = draw(st.sampled_from([Norms(), Norms(fc=True), Norms(output=True), Norms(before_fc=not is_mla)]))
    return HeadSpec(
        attention=draw(mla if is_mla else gqa),
        hidden=hidden,
        target_hidden=draw(st.sampled_from([hidden, hidden + 1])),
        intermediate=draw(_DIM),
        layers=draw(st.integers(1, 3)),
        vocab=vocab,
        draft_vocab=vocab if is_mla else draw(st.sampled_from([vocab, vocab - 1, 1])),
        # Engines take every scaled RoPE of an MLA head for DeepSeek's YaRN.
        rope=draw(mla_ropes if is_mla else gqa_ropes),
        captured=tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=4)))),
        eps=draw(st.sampled_from([1e-5, 1e-6])),
        dtype="BF16" if is_mla else draw(st.sampled_from(["BF16", "F16", "F32"])),
        max_positions=draw(st.integers(8, 262144)),
        norms=norms,
        tokens=Tokens(draw(_TOKEN), draw(_TOKEN | st.lists(st.integers(0, 9), min_size=1).map(tuple)), draw(_TOKEN)),
        mlp_bias=False if is_mla else draw(st.booleans()),
    )
