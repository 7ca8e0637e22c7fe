"""Drafting chains against one chain at a time: with a cache, and written out from the formulas."""

import cmath
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kconv.drafters import attention
from kconv.drafters.attention import CausalContext
from kconv.drafters.chain import along_chains, count_chains, draft_logits, draft_tokens, unroll
from kconv.drafters.spec import Gqa, Mla, Norms, Rope, Yarn
from kconv.errors import PromptsInvalid

gqas = st.builds(
    lambda kv_heads, groups, head_dim, bias: Gqa(kv_heads * groups, kv_heads, head_dim, bias),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([2, 8]),
    st.booleans(),
)
mlas = st.builds(
    Mla,
    heads=st.sampled_from([1, 3]),
    q_lora_rank=st.sampled_from([4, 12]),
    kv_lora_rank=st.sampled_from([6, 16]),
    qk_nope_head_dim=st.sampled_from([2, 8]),
    qk_rope_head_dim=st.sampled_from([2, 4]),
    v_head_dim=st.sampled_from([3, 8]),
)
all_norms = st.builds(Norms, *[st.booleans()] * 4)
shapes = st.fixed_dictionaries(
    {
        "attention": st.one_of(gqas, mlas),
        "layers": st.integers(1, 2),
        "captured": st.integers(1, 4).map(lambda n: tuple(range(n))),
        "hidden": st.sampled_from([10, 24]),
        "target_hidden": st.sampled_from([6, 24]),
        "draft_vocab": st.sampled_from([5, 11]),
        "norms": all_norms,
        "mask": st.sampled_from([None, 3]),
    }
)


def text_and_states(spec, length, seed, batch=2):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(spec.vocab, (batch, length), generator=generator)
    width = len(spec.captured) * spec.target_hidden
    return tokens, torch.randn(batch, length, width, generator=generator)


def fused_mask(head):
    return None if head.spec.mask is None else head.fuse(head.weights["mask_hidden"])[0, 0]


# One chain, written out: no code of the room but the weights.


def turned(x, positions, theta, interleaved):
    """Turn `[heads, T, dim]` by multiplying complex numbers."""
    dim = x.shape[-1]
    angles = [[p * theta ** (-2 * j / dim) for j in range(dim // 2)] for p in positions]
    phasors = torch.tensor([[cmath.exp(1j * a) for a in row] for row in angles]).to(torch.complex64)
    if interleaved:
        z = torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous()) * phasors
        return torch.stack([z.real, z.imag], -1).flatten(-2)
    z = torch.complex(x[..., : dim // 2].contiguous(), x[..., dim // 2 :].contiguous()) * phasors
    return torch.cat([z.real, z.imag], -1)


def causal_layer(spec, w, i, x, residual, positions):
    """One decoder layer over an explicit sequence `[T, width]`."""

    def linear(name, x):
        return F.linear(x, w[f"{i}.{name}"], w.get(f"{i}.{name}.bias"))

    def norm(name, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt() * w[f"{i}.{name}"]

    def heads(x, count):
        return x.view(len(x), count, -1).transpose(0, 1)

    a, theta = spec.attention, spec.rope.theta
    if isinstance(a, Gqa):
        q = turned(heads(linear("q_proj", x), a.heads), positions, theta, False)
        k = turned(heads(linear("k_proj", x), a.kv_heads), positions, theta, False)
        v = heads(linear("v_proj", x), a.kv_heads)
    else:
        q = heads(linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x))), a.heads)
        nope = a.qk_nope_head_dim
        q = torch.cat([q[..., :nope], turned(q[..., nope:], positions, theta, True)], -1)
        compressed = linear("kv_a_proj_with_mqa", x)
        rotary = turned(compressed[None, :, a.kv_lora_rank :], positions, theta, True)
        kv = heads(linear("kv_b_proj", norm("kv_a_layernorm", compressed[:, : a.kv_lora_rank])), a.heads)
        k = torch.cat([kv[..., :nope], rotary.expand(a.heads, -1, -1)], -1)
        v = kv[..., nope:]
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    after = residual + linear("o_proj", out.transpose(0, 1).flatten(1))
    x = norm("post_attention_layernorm", after)
    return after + linear("down_proj", F.silu(linear("gate_proj", x)) * linear("up_proj", x))


def one_chain(spec, w, tokens, fused, masked, chain, steps):
    """Draft one chain of one text: at each step, the whole sequence of entries so far runs again.

    Of a P-EAGLE head, an entry after the first has the mask token and `masked`, its fused `mask_hidden`.
    """

    def norm(name, x):
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.eps).sqrt() * w[name]

    entry_tokens, entry_hidden = tokens[1 : chain + 2].tolist(), list(fused[: chain + 1])
    logits = []
    for k in range(1, steps + 1):
        hidden = torch.stack(entry_hidden)
        normed = norm("0.hidden_norm", hidden)
        x = torch.cat([norm("0.input_layernorm", w["embed_tokens"][entry_tokens]), normed], -1)
        positions = range(len(hidden))
        out = causal_layer(spec, w, 0, x, normed if spec.norms.before_residual else hidden, positions)
        for i in range(1, spec.layers):
            out = causal_layer(spec, w, i, norm(f"{i}.input_layernorm", out), out, positions)
        final = norm("norm", out[-1])
        logits.append(w["lm_head"] @ final)
        if spec.mask is None:
            entry_tokens.append(int(tokens[chain + k + 1]))
            entry_hidden.append(final if spec.norms.output else out[-1])
        else:
            entry_tokens.append(spec.mask)
            entry_hidden.append(masked)
    return torch.stack(logits)


@given(shape=shapes, steps=st.integers(1, 4), extra=st.integers(0, 4), seed=st.integers(0, 99), few=st.booleans())
@settings(deadline=None, max_examples=60)
def test_chains_are_what_one_chain_at_a_time_gives(make_spec, make_head, shape, steps, extra, seed, few):
    spec = make_spec(**shape)
    head = make_head(spec, seed)
    tokens, captured = text_and_states(spec, steps + 2 + extra, seed)
    with pytest.MonkeyPatch.context() as patch:
        # Scores of one head at a time, as of a long text, or of all.
        patch.setattr(attention, "SCORE_BYTES", 1 if few else attention.SCORE_BYTES)
        got = draft_logits(head, tokens, captured, steps)
    assert got.shape == (steps, 2, 1 + extra, spec.draft_vocab)
    fused, masked = head.fuse(captured), fused_mask(head)
    for row in range(2):
        for chain in range(1 + extra):
            want = one_chain(spec, head.weights, tokens[row], fused[row], masked, chain, steps)
            torch.testing.assert_close(got[:, row, chain], want, rtol=1e-3, atol=1e-4)


@given(shape=shapes, steps=st.integers(1, 4), extra=st.integers(0, 4), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_chains_are_what_a_growing_cache_gives(make_spec, make_head, shape, steps, extra, seed):
    rope = Rope(50.0, Yarn(8.0, 4, mscale=1.0, mscale_all_dim=0.5))
    spec = make_spec(**shape, rope=rope)
    head = make_head(spec, seed)
    tokens, captured = text_and_states(spec, steps + 2 + extra, seed)
    rows = list(unroll(head, tokens, captured, steps))
    for chain in range(1 + extra):
        context = CausalContext()
        hidden, logits = head.step(
            tokens[:, 1 : chain + 2], head.fuse(captured[:, : chain + 1]), torch.arange(chain + 1), context
        )
        hidden, logits = hidden[:, -1:], logits[:, -1:]
        for k, row in enumerate(rows, 1):
            torch.testing.assert_close(row.logits[:, chain], logits[:, 0], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(row.returned[:, chain], hidden[:, 0], rtol=1e-3, atol=1e-4)
            if k < steps:
                token = tokens[:, chain + k + 1, None]
                if spec.mask is not None:
                    token, hidden = torch.full_like(token, spec.mask), fused_mask(head).expand_as(hidden)
                hidden, logits = head.step(token, hidden, torch.tensor([chain + k]), context)


@pytest.mark.parametrize("attention", [Gqa(4, 2, 8), Mla(3, 12, 16, 8, 4, 6)])
def test_only_differences_of_positions_matter(make_spec, make_head, attention):
    spec = make_spec(attention=attention)
    head = make_head(spec)
    tokens, captured = text_and_states(spec, 6, 0)
    contexts = CausalContext(), CausalContext()
    fused = head.fuse(captured)
    near, far = (
        head.step(tokens, fused, torch.arange(6) + start, context)[1]
        for start, context in zip((0, 40), contexts, strict=True)
    )
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-4)


def test_a_chain_knows_nothing_of_the_text_behind_it(make_spec, make_head):
    """Step k of chain t sees tokens up to x[t+k] and states up to t; all else may change."""
    spec = make_spec(layers=2)
    head = make_head(spec)
    tokens, captured = text_and_states(spec, 12, 3)
    before = draft_logits(head, tokens, captured, 3)
    changed, states = tokens.clone(), captured.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % spec.vocab
    states[:, 6:] += 1.0
    after = draft_logits(head, changed, states, 3)
    for k in (1, 2, 3):
        for chain in range(8):
            same = torch.allclose(before[k - 1, :, chain], after[k - 1, :, chain], atol=1e-6)
            assert same == (chain <= 5 and chain + k <= 7), (k, chain)


def test_gradients_flow_through_all_steps(make_spec, make_head):
    head = make_head(make_spec())
    tokens, captured = text_and_states(head.spec, 8, 0)
    head.weights["0.hidden_norm"].requires_grad_()
    steps = list(unroll(head, tokens, captured, 3))
    steps[-1].logits.sum().backward()
    assert head.weights["0.hidden_norm"].grad.abs().sum() > 0
    assert steps[1].hidden is steps[0].returned


@given(shape=shapes, seed=st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_draft_tokens_are_target_ids_of_the_largest_logit(make_spec, make_head, shape, seed):
    head = make_head(make_spec(**shape), seed)
    tokens, captured = text_and_states(head.spec, 7, seed)
    drafted = draft_tokens(head, tokens, captured, 2)
    logits = draft_logits(head, tokens, captured, 2)
    everywhere = torch.full((*logits.shape[:-1], head.spec.vocab), float("-inf"))
    offsets = head.weights.get("d2t", torch.zeros(head.spec.draft_vocab, dtype=torch.long))
    for row in range(head.spec.draft_vocab):
        everywhere[..., row + offsets[row]] = logits[..., row]
    assert torch.equal(drafted, everywhere.argmax(-1))


def test_along_chains_follows_the_alignment():
    values = torch.arange(8).repeat(2, 1)
    laid = along_chains(values, 3)
    assert laid.shape == (3, 2, count_chains(8, 3)) == (3, 2, 4)
    assert laid[:, 0].tolist() == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_text_too_short_for_a_chain_is_refused(make_spec, make_head, steps):
    head = make_head(replace(make_spec()))
    tokens, captured = text_and_states(head.spec, steps + 1, 0)
    with pytest.raises(PromptsInvalid, match=f"{steps + 1} tokens"):
        draft_logits(head, tokens, captured, steps)
