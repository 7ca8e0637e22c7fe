"""Eagle3 draft heads, from the trainer to the engines, with proof at every step."""

# Made by scripts/docs stub, from the operations.

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from .bench.acceptance import AcceptanceFile
from .errors import KconvError as KconvError
from .errors import Problem as Problem
from .operations.bench import Compared, Written
from .operations.card import CardWritten
from .operations.convert import Converted
from .operations.diff import Diffed
from .operations.env import Environment
from .operations.generate import Generated
from .operations.inspect import Inspected
from .operations.publish import PublishResult
from .operations.quantize import Calibrated, Quantized
from .operations.states import StatesWritten
from .operations.tiny import TinyMade
from .operations.train import Trained
from .operations.verify import Verified
from .operations.vocab import VocabChanged, VocabExamined
from .validate.report import Report

_Path = str | PathLike[str]

def tiny(
    out: _Path,
    *,
    size: Literal["demo", "test"] = "test",
    documents: int = 400,
    prompts: int = 8,
    prompt_tokens: int = 96,
) -> TinyMade:
    """Train a tiny Kimi-K2 and write it, with texts, into the new folder OUT, for the demo and the example recipe.

    Training takes a few minutes on two cores, once; the target is cached in $KCONV_CACHE or ~/.cache/kconv. OUT holds
    `target/`, `train.jsonl`, `eval.jsonl` and `held-out.jsonl`.

    Args:
        out: The folder to write; it must not exist.
        size: demo: the demo's target. test: a smaller one.
        documents: Documents to train a head on.
        prompts: Held-out prompts.
        prompt_tokens: Minimum length of a held-out prompt.
    """

def inspect(
    head: _Path,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
) -> Inspected:
    """Show what HEAD is: its layout, attention, dims, RoPE, captured layers, tensors and parameters.

    Reads only the config and the headers; from a Hub id it downloads nothing else. UNDECIDED marks what the files
    leave open, with the candidates and what would decide it. A checkpoint that is no drafter is named. The exit
    code is 0 for every checkpoint that can be parsed.

    Args:
        head: The head: a folder, a Hub id or its URL.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
    """

def diff(
    a: _Path,
    b: _Path,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    headers_only: bool = False,
) -> Diffed:
    """Show what differs between two drafters, A and B, of any family and in any two layouts.

    The config is compared by meaning and key by key, tensors by slot: dtype, shape and bytes. If one of them cannot
    be read, or their families differ, keys and tensors are compared by name. Keys that two layouts spell differently
    are shown, but do not count. Engines whose verdicts on A and B differ are shown with the rules. Exit code 0: the
    same drafter; 1: they differ.

    Options state a fact for whichever of the two leaves it open: what files say, no option changes.

    Args:
        a: A drafter: a folder or a Hub id.
        b: The one to compare it with.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        headers_only: Compare no bytes; read and download no weights.
    """

def env(
    *,
    engine_python: Sequence[_Path] = (),
) -> Environment:
    """Show what to paste into a bug report: versions, engines and the machine.

    Shows no path, host name, token or value of an environment variable. Looks for engines next to kconv, and in the
    environments that --engine-python names.

    Args:
        engine_python: Python of an engine's environment; repeatable.
    """

def vocab(
    head: _Path,
    out: _Path | None = None,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    text: _Path | None = None,
    rebuild_t2d: bool = False,
    absolute: bool = False,
    expand: bool = False,
    prune: int | None = None,
    trust_remote_code: bool = False,
) -> VocabChanged | VocabExamined:
    """Examine HEAD's draft vocabulary and exit 1 on any error; or write OUT with another vocabulary.

    Shows whether d2t holds offsets or absolute ids, their order and errors, and whether t2d agrees. --target adds lost
    special tokens and whether the rows are the target's (from a Hub id only its tokenizer and lm_head are downloaded).
    --text adds the share of the text's tokens that the head can draft; of dialogues (JSONL), those of the answers.

    Args:
        head: The head: a folder or a Hub id.
        out: The folder to write, if the vocabulary changes.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        text: Text, dialogues or prompts, for the coverage and --prune.
        rebuild_t2d: Write OUT with a t2d rebuilt from d2t.
        absolute: Write OUT with offsets, from a d2t with absolute ids.
        expand: Write OUT with the full vocabulary.
        prune: Write OUT with the N most frequent tokens.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
    """

def convert(
    head: _Path,
    out: _Path,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    to: str,
    drop_shared: bool = False,
    dtype: Literal["bfloat16"] | None = None,
    attention: Literal["mha", "mla"] | None = None,
    states: _Path | None = None,
    prompts: _Path | None = None,
    context: int = 512,
    heal: int | None = None,
    head_dim: Literal["auto", "192", "256"] = "auto",
    latent: int = 512,
    min_retention: float = 0.97,
    device: Literal["cpu", "cuda"] = "cpu",
    trust_remote_code: bool = False,
) -> Converted:
    """Write HEAD in an engine's layout into the new folder OUT, with a kconv.json manifest.

    The conversion is exact unless you give --dtype or --attention: every weight keeps its bytes, and the manifest
    records every source tensor.

    --attention changes the attention. That is an approximation: it is fitted to --target's states, healed
    (fine-tuned), measured on held-out text, and refused if it retains too little.

    Without it, --prompts or --states measure on --target what the head's files leave open. The conversion uses what
    this decides, and refuses your reading if another one beats it.

    Args:
        head: The head to convert: a folder or a hub id.
        out: The folder to write; it must not exist.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        to: The layout to write.
        drop_shared: Omit tensors that are byte-identical to --target's.
        dtype: Cast the weights to this dtype; not exact.
        attention: Change the attention; not exact.
        states: Output of kconv states, to fit --attention or measure.
        prompts: Prompts (JSONL) for --target, instead of --states.
        context: Tokens per text of --prompts; as long as you serve.
        heal: Healing (fine-tuning) steps; 200 by default.
        head_dim: Head dim of MHA; vLLM's FlashInfer needs 256.
        latent: Entries that MLA's latent may use; it is padded to the 512 of engines.
        min_retention: Smallest share of the acceptance length that may remain.
        device: Device for all but the target, which --prompts runs on the CPU.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
    """

def verify(
    head: _Path,
    source: _Path | None = None,
) -> Verified:
    """Check every byte of OUT against its kconv.json, and SOURCE's tensors too if you give it.

    Args:
        head: A folder that kconv wrote.
        source: The checkpoint that it was made from.
    """

def validate(
    head: _Path,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    for_: Sequence[str] | str = (),
    source: _Path | None = None,
    results: Sequence[_Path] = (),
    source_results: Sequence[_Path] = (),
    headers_only: bool = False,
    strict: bool = False,
    prompts: _Path | None = None,
    states: _Path | None = None,
    draft_tokens: int | None = None,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    seed: int = 0,
    calibrated_on: Sequence[_Path] = (),
    min_retention: float = 0.97,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    engine: str | None = None,
    engine_python: str | None = None,
    url: str | None = None,
    out: _Path | None = None,
) -> Report:
    """Check HEAD; exit 1 if an engine would fail on it or serve wrong numbers, 3 if an option must decide that.

    Checks names, shapes, config, known engine faults, and every value. --source compares the bits. --target with
    --prompts measures logits, top-1 agreement and acceptance length on the prompts' own text and on the target's
    sampled and greedy continuations. HEAD may also be a target: then its quantization is checked, with --source the
    noise of every tensor, and with --prompts both perplexities.

    Args:
        head: A head or a target: a folder or a Hub id.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        for_: Engine that will serve it, or all; by default its layout's; repeatable.
        source: The checkpoint that HEAD was made from, to compare.
        results: lm_eval's results_*.json of HEAD, a target; needs --source-results; repeatable.
        source_results: The same of its source; repeatable.
        headers_only: Read and download no weights.
        strict: Fail on warnings and undecided facts too.
        prompts: Held-out prompts: a JSONL, or mt-bench@<commit>. Needs --target, or for a target --source.
        states: Output of kconv states, instead of --prompts.
        draft_tokens: Draft tokens per step (K). Without it 3, or a whole block.
        prompt_tokens: Cut prompts to N tokens.
        new_tokens: Continue prompts by N tokens.
        seed: Random seed for sampling.
        calibrated_on: A states.json, whose prompts are refused as held-out text; repeatable.
        min_retention: Smallest share of the acceptance length that may remain.
        allow_pickle: Read ModelOpt's .pt files as --states.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
        engine: Let this engine serve HEAD, and compare it with kconv's own computation.
        engine_python: Python of the engine's environment (see scripts/engine-env).
        url: A running engine that serves --target with HEAD.
        out: A folder for report.json, report.md and report.html.
    """

def bench(
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path | None = None,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    url: str | None = None,
    head: _Path,
    suite: _Path,
    revision: str | None = None,
    categories: Sequence[str] | str = (),
    limit: int | None = None,
    out: _Path,
    draft_tokens: Sequence[int] | int | str | None = None,
    engine: str | None = None,
    engine_python: str | None = None,
    ready_seconds: int = 300,
    tree: str = "chain",
    speed_at: Sequence[int] | int | str = (),
    concurrency: int = 1,
    max_tokens: int = 1024,
    temperature: float = 0.0,
    reasoning: str | None = None,
    target_name: str | None = None,
    precision: str | None = None,
    model: str | None = None,
    engine_version: str | None = None,
    draft_sample_method: str | None = None,
    rejection_sample_method: str | None = None,
    baseline_url: str | None = None,
    extra: Mapping[str, Any] = {},
    trust_remote_code: bool = False,
) -> AcceptanceFile:
    """Measure acceptance length per category of a suite, and record the measuring conditions.

    --url measures a running server, from its answers or from its counters; nobody else may use it during the run.
    --engine starts a server in fp32. Without either, kconv computes --head and --target itself.

    Args:
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target; its depth decides the default captured layers.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        url: A running vLLM, SGLang or TensorRT-LLM that speculates.
        head: The head to measure, or that is served.
        suite: mt-bench, speed-bench, or a JSONL file of prompts.
        revision: Revision of the suite; by default a pinned commit for SPEED-Bench, main for MT-Bench.
        categories: Only these categories of the suite.
        limit: Use only N prompts of each category.
        out: The acceptance.json to write.
        draft_tokens: Draft tokens per step (K), as served; without --url also a range. By default 3, or a block.
        engine: Start this engine to serve --target with --head.
        engine_python: Python of the engine's environment (see scripts/engine-env).
        ready_seconds: Seconds that a started engine may take to be ready.
        tree: Shape of drafts: topk=4,nodes=8 is 4 branches and 8 verified tokens, the last accepted one included.
        speed_at: Measure speed too, at these concurrencies.
        concurrency: Requests in flight.
        max_tokens: Maximum tokens per answer.
        temperature: 0 is greedy.
        reasoning: The target's reasoning mode, e.g. medium.
        target_name: Hub id of the target; by default the server's name.
        precision: Number format of the target, e.g. NVFP4.
        model: The server's name for the target.
        engine_version: The engine's version, if not reported.
        draft_sample_method: How drafts were sampled, e.g. greedy, if not reported.
        rejection_sample_method: How drafts were rejected, e.g. standard, if not reported.
        baseline_url: The same target without speculation, for the speed-up.
        extra: Extra fields for each request.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
    """

def compare(
    files: Sequence[_Path],
    *,
    chart: str | None = None,
) -> Compared:
    """Compare the acceptance.json FILES of two or more heads.

    Figures are compared only if all their measuring conditions are stated and equal. The others are listed with
    the difference. Exit 1 if nothing is comparable.

    Args:
        files: The acceptance.json files.
        chart: Write a chart of the comparable figures (PNG).
    """

def curve(
    files: Sequence[_Path],
    *,
    category: str | None = None,
    model: str | None = None,
    out: _Path,
) -> Written:
    """Write the golden acceptance curve of a head's acceptance.json FILES, in the form that InferenceX uses.

    Each figure has one K and one thinking mode (--reasoning of kconv bench). The category is SPEED-Bench's coding, or
    --category. All figures of a mode must have been measured in the same way.

    Args:
        files: acceptance.json files about one head.
        category: Category; by default coding for SPEED-Bench, else all.
        model: The target's name in the curve; by default its own in lower case.
        out: The YAML to write.
    """

def quote(
    file: _Path,
    *,
    head: str | None = None,
    url: str | None = None,
    out: _Path,
    dataset: str | None = None,
    revision: str | None = None,
    category: str | None = None,
    prompts: int | None = None,
    draft_tokens: int | None = None,
    tree: str | None = None,
    engine: str | None = None,
    engine_version: str | None = None,
    target: str | None = None,
    precision: str | None = None,
    temperature: float | None = None,
    reasoning: str | None = None,
    max_tokens: int | None = None,
    draft_sample_method: str | None = None,
    rejection_sample_method: str | None = None,
    date: str | None = None,
) -> AcceptanceFile:
    """Write figures that another program measured as acceptance.json, with their origin.

    FILE is a result of vllm bench serve, of AIPerf (profile_export_aiperf.json) or of sglang.bench_serving, or one of
    InferenceX's golden curves. Add what the file leaves open with options. A figure with an unstated condition is
    never compared.

    Args:
        file: The result.
        head: Hub id of the head.
        url: Where the result was published.
        out: The acceptance.json to write.
        dataset: The data set, e.g. mt-bench.
        revision: Revision of the dataset.
        category: Its category.
        prompts: Number of prompts.
        draft_tokens: K.
        tree: Shape of drafts.
        engine: The engine, e.g. vllm.
        engine_version: The engine's version, if not reported.
        target: Hub id of the target.
        precision: Number format of the target, e.g. NVFP4.
        temperature: 0 is greedy.
        reasoning: The target's reasoning mode, e.g. medium.
        max_tokens: Maximum tokens per answer.
        draft_sample_method: How drafts were sampled, e.g. greedy, if not reported.
        rejection_sample_method: How drafts were rejected, e.g. standard, if not reported.
        date: Date of the measurement, e.g. 2026-11-23.
    """

def states(
    target: _Path,
    out: _Path,
    *,
    prompts: _Path | None = None,
    data: _Path | None = None,
    split: str | None = None,
    revision: str | None = None,
    captured: Sequence[int] | str | None = None,
    sampled: int = 0,
    greedy: int = 0,
    prompt_tokens: int | None = None,
    text_tokens: int | None = None,
    chat: bool = False,
    held_out: bool = True,
    seed: int = 0,
    dtype: Literal["F32", "BF16", "F16"] | None = None,
    shard_mib: int = 512,
    seq: int = 4096,
    url: str | None = None,
    shared: str | None = None,
    concurrency: int = 16,
    trust_remote_code: bool = False,
) -> StatesWritten:
    """Run TARGET on prompts and write the hidden states that an Eagle3 head reads into the new folder OUT.

    Each sequence has its token ids, the captured layers' outputs, the state after the final norm, and, for answers and
    continuations, a mask of the target's own tokens. The same command resumes a killed run.

    --data takes dialogues with answers, as kconv generate writes them, for kconv train --states. --prompts takes
    prompts, and the target continues them.

    The index lays out training rows of --seq tokens. kconv train with this seq then reads only its own rows, however
    many there are; with another one it also reads the whole index at the start.

    A target that fits only into a server runs there: in vLLM 0.32 or later with hidden-state extraction. Its layer ids
    are those of --captured plus one, followed by the number of layers. kconv cannot query them, so set them correctly.
    For 61 layers and --captured 1,29,57:

    
      --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config":
        {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58, 61]}}}'
      --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/shared"}}'

    Args:
        target: The target: a folder or a Hub id.
        out: The folder to write; it must not exist.
        prompts: Prompts (JSONL).
        data: Dialogues or texts: a JSONL, or a dataset's Hub id.
        split: Split of the dataset; train by default.
        revision: Revision of the dataset.
        captured: Layers, as 0-based outputs; by default 1, N//2 - 1, N - 4.
        sampled: Also continue prompts by N sampled tokens.
        greedy: Also continue prompts greedily by N tokens.
        prompt_tokens: Cut prompts to N tokens.
        text_tokens: Cut prompt text or dialogues to N tokens.
        chat: Apply the target's chat template to prompts.
        held_out: False: Leave out the prompts' own text.
        seed: Random seed for sampling.
        dtype: Dtype; by default the target's.
        shard_mib: Maximum size of a file.
        seq: Tokens of a training row, the recipe's seq.
        url: A vLLM that runs TARGET with hidden-state extraction.
        shared: The folder that this vLLM writes states to.
        concurrency: Requests in flight.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
    """

def generate(
    *,
    url: str,
    model: str,
    prompts: _Path,
    out: _Path,
    max_tokens: int = 4096,
    temperature: float = 0.6,
    concurrency: int = 16,
    seed: int = 0,
) -> Generated:
    """Send each prompt, with all its turns, to the server at --url, and write the dialogues to --out for kconv train.

    Every prompt is answered, failed with a reason, or skipped because --out has its answer. The same command resumes a
    stopped run and retries failed prompts. Exit 1 if any failed.

    Args:
        url: An OpenAI-compatible server, e.g. http://127.0.0.1:8000.
        model: The server's name for the target.
        prompts: Prompts (JSONL).
        out: The dialogues (JSONL); existing answers are kept.
        max_tokens: Maximum tokens per answer.
        temperature: 0 is greedy.
        concurrency: Requests in flight.
        seed: Random seed for sampling.
    """

def train(
    target: _Path,
    out: _Path,
    *,
    recipe: _Path,
    set: Mapping[str, Any] = {},
    data: _Path | None = None,
    split: str | None = None,
    revision: str | None = None,
    held_out: _Path | None = None,
    states: _Path | None = None,
    url: str | None = None,
    shared: str | None = None,
    concurrency: int = 16,
    init_from: _Path | None = None,
    save_every: int = 200,
    eval_every: int = 200,
    shard: bool = False,
    tensorboard: bool = False,
    rate: float | None = None,
    trust_remote_code: bool = False,
) -> Trained:
    """Train a drafter of the recipe's family for TARGET into the new folder OUT, with ModelOpt's loss.

    --data runs the target during training, whole in each process; with --url and --shared a vLLM runs it, started as
    for kconv states, and its states are removed once they are read. --states does not run it. With --states or --url
    only its embedding, final norm and output matrix are loaded.

    Several processes (torchrun) share each batch; their number must divide it. Each process reads its own rows, so
    a node needs only the files of --states that its processes read; --dry-run --json lists them. It takes the number of
    processes from WORLD_SIZE and those of a node from LOCAL_WORLD_SIZE.

    The same command, with the same number of processes, resumes a stopped run from its last checkpoint
    (.NAME.training next to OUT) and ends with the same weights. OUT is ready for kconv to-vllm. It has ModelOpt's
    layout, an Eagle3 head TensorRT-LLM's, or vLLM's if it is an MLA head that TensorRT-LLM cannot run, with a reduced
    vocabulary or not in bfloat16. Its manifest records the training; its folder modelopt has the head as ModelOpt's
    module, and the curves.

    --dry-run prints steps, memory, disk and, with --rate, hours. It reads the data only if the recipe does not state
    both steps and batches.

    Args:
        target: The target: a folder or a Hub id.
        out: The folder to write; it must not exist.
        recipe: eagle3-mla, eagle3-gqa, dflash, dspark, or a YAML file.
        set: Set a key of the recipe; repeatable.
        data: Dialogues or texts: a JSONL, or a dataset's Hub id.
        split: Split of the dataset; train by default.
        revision: Revision of the dataset.
        held_out: Evaluation text; by default a fiftieth of --data.
        states: Output of kconv states, instead of --data.
        url: A vLLM that runs TARGET with hidden-state extraction.
        shared: The folder that this vLLM writes states to.
        concurrency: Requests in flight per process.
        init_from: A head to continue from, in any layout.
        save_every: Steps between checkpoints.
        eval_every: Steps between held-out evaluations.
        shard: Distribute the head over torchrun's processes (FSDP2).
        tensorboard: Write TensorBoard event files.
        rate: Tokens per second of all processes, for --dry-run.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
    """

def calibrate(
    target: _Path,
    out: _Path,
    *,
    tokens: int = 512,
    chat: bool = False,
    trust_remote_code: bool = False,
    prompts: _Path,
    dtype: Literal["F32", "BF16", "F16"] | None = None,
) -> Calibrated:
    """Run TARGET on prompts, and write the largest input of each linear layer to the new file OUT (JSON).

    The target runs layer by layer from disk, with one layer in memory; quantized layers are dequantized. The same
    command resumes an interrupted run after its last layer.

    Args:
        target: The target: a folder or a Hub id.
        out: The file to write; it must not exist.
        tokens: Cut each prompt to N tokens.
        chat: Apply the target's chat template to prompts.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
        prompts: Prompts (JSONL).
        dtype: Dtype; by default the target's.
    """

def quantize(
    target: _Path,
    out: _Path,
    *,
    tokens: int = 512,
    chat: bool = False,
    trust_remote_code: bool = False,
    recipe: _Path,
    input_scale: _Path | None = None,
    jobs: int | None = None,
    backend: Literal["stream", "modelopt"] = "stream",
    prompts: _Path | None = None,
) -> Quantized:
    """Write TARGET in NVFP4 into the new folder OUT, with a kconv.json manifest.

    TARGET may be bf16, INT4 (Kimi-K2-Thinking, K2.5, K2.6), FP8 blocks (Kimi-K2-Instruct, DeepSeek-V3) or
    compressed-tensors' or DeepSeek-V4's MXFP4, which is cast exactly.
    Unquantized tensors keep their bytes. The streaming backend holds one tensor at a time, divides the work over
    torchrun's ranks, and resumes an interrupted run. --backend modelopt is one process with the whole target in memory,
    and does not resume.

    Recipes: nvfp4-experts (the routed experts), nvfp4-mlp (shared experts and dense layers too), nvfp4 (attention
    too), nvfp4-weight-only (activations stay bf16), nvfp4-experts-mse and nvfp4-experts-four-over-six (block scales
    by search), nvfp4-experts-fp8-attention (attention in FP8), or a YAML file.

    Args:
        target: The target: a folder or a Hub id.
        out: The folder to write; it must not exist.
        tokens: Cut each prompt to N tokens.
        chat: Apply the target's chat template to prompts.
        trust_remote_code: Run the tokenizer's own Python code; the target must be pinned.
        recipe: A recipe's name or file.
        input_scale: A file of kconv calibrate, or data-free: 1.0 everywhere.
        jobs: Processes, about 1 GiB each; by default one per core.
        backend: stream: one tensor at a time. modelopt: ModelOpt's own, with the whole target in memory.
        prompts: Calibration prompts (JSONL) for --backend modelopt.
    """

def quantize_head(
    head: _Path,
    out: _Path,
    *,
    from_: str | None = None,
    captured: Sequence[int] | str | None = None,
    captured_are: Literal["outputs", "inputs"] | None = None,
    rope_theta: float | None = None,
    layers: int | None = None,
    max_positions: int | None = None,
    target: _Path,
    target_layers: int | None = None,
    mask_token: int | None = None,
    sample_from_anchor: bool | None = None,
    norm_before_residual: bool | None = None,
    format: Literal["fp8", "nvfp4"],
    states: _Path,
    min_retention: float = 0.97,
) -> Converted:
    """Write HEAD with FP8 or NVFP4 linear layers into the new folder OUT, with a kconv.json manifest.

    Attention and MLP of a GQA or MHA head are quantized, and the MLP of an MLA head. fc, lm_head, the embedding and the
    norms keep their bytes. Linear layers that engines fuse share scales. OUT has HEAD's layout; kconv to-vllm OUT and
    the other conversions copy it unchanged.

    Nine in ten of the states' prompts give the input scales. On the rest kconv measures the acceptance length, with
    weights and inputs rounded as in an engine, before it writes anything. The whole head is in memory, in fp32.

    Args:
        head: The head: a folder or a Hub id.
        out: The folder to write; it must not exist.
        from_: Layout of the head; detected by default.
        captured: The captured (auxiliary hidden-state) layers, as 0-based outputs, e.g. 1,29,57.
        captured_are: Whether the config lists outputs or inputs.
        rope_theta: RoPE base, if the config omits it.
        layers: Decoder layers of the head, if the config states the target's.
        max_positions: Longest context that you will serve.
        target: The target that the states come from.
        target_layers: The target's depth, instead of --target.
        mask_token: mask_token_id, if the config omits it.
        sample_from_anchor: sample_from_anchor, if the config omits it.
        norm_before_residual: norm_before_residual, if the config omits it.
        format: Number format of the linear layers.
        states: Output of kconv states, for calibration.
        min_retention: Smallest share of the acceptance length that may remain.
    """

def card(
    head: _Path,
    *,
    report: _Path | None = None,
    acceptance: Sequence[_Path] = (),
    facts: _Path | None = None,
    style: Literal["short", "compact", "nvidia"] = "short",
    name: str = "",
    base_model: str = "",
    license: str = "unknown",
    license_file: Sequence[_Path] = (),
    target: _Path | None = None,
    source: _Path | None = None,
    model_index: bool = False,
    chart: bool = True,
    init: str | None = None,
    force: bool = False,
    missing: bool = False,
    check: bool = False,
    out: _Path | None = None,
) -> CardWritten:
    """Write HEAD's model card from its manifest, reports, figures and facts.

    Empty sections are left out. --missing lists the facts that they need, and --init writes a facts file to fill in.
    License texts are copied from the source, the target and --license-file; Apache-2.0's kconv brings itself. A folder
    that kconv did not write also gets a card, if --name or the facts name the head. Exit 1 if --missing or --check find
    something, or if a license requires more than the card has. --out copies HEAD, the evidence and the card into a new
    folder for kconv publish.

    Args:
        head: The head's folder.
        report: report.json of kconv validate.
        acceptance: acceptance.json of kconv bench, or quoted; repeatable.
        facts: YAML with facts that no file states; see --init.
        style: Sections and their order.
        name: Hub id under which the head will be published.
        base_model: Hub id of the target.
        license: License of the head: an SPDX id, or its name on the Hub.
        license_file: Text of a license; repeatable.
        target: The target, for its license.
        source: The checkpoint that HEAD was made from, for its license.
        model_index: Also write the figures into the front matter.
        chart: False: Draw no chart.
        init: Write a facts file to fill in, with comments, and no card.
        force: Overwrite an existing card, licenses and facts file.
        missing: List the missing facts; write nothing.
        check: Check HEAD's card and licenses; write nothing.
        out: A new folder for the head, its evidence and its card.
    """

def publish(
    folder: _Path,
    repo: str = "",
    *,
    tag: str = "",
    private: bool = False,
    public: bool = False,
    revision: str = "",
    create_pr: bool = False,
    expect_parent: str = "",
    offline: bool = False,
    report: _Path | None = None,
    acceptance: Sequence[_Path] = (),
    facts: _Path | None = None,
    min_acceptance: float | None = None,
    metric: str = "al_incl_bonus",
    suite: str | None = None,
    target_name: str | None = None,
    temperature: float | None = None,
    draft_tokens: int | None = None,
    min_prompts: int | None = None,
    max_loss: float | None = None,
    allow: Mapping[str, Any] = {},
    out: _Path | None = None,
) -> PublishResult:
    """Publish DIR, a head with its card, as the repository REPO (org/name) on the Hub.

    Refused unless the manifest matches, the report has no errors and belongs to these weights, the acceptance reaches
    the floor, the card agrees with them, and its licenses are complete. Then kconv makes one commit, reads every file
    back, and sets the tag. A repeated call does nothing; an interrupted one resumes. The token comes from HF_TOKEN, hf
    auth login, or, if HF_OIDC_RESOURCE is set, the CI job's identity.

    Options that you omit come from DIR's recipe: the floor, the facts, and, from its publish step for REPO or its
    only publish step, the repository, tag, branch, visibility and allowed checks. With --create-pr, the recipe's tag,
    branch and --public wait until the pull request is merged.

    Args:
        folder: The folder to publish.
        repo: The repository, org/name.
        tag: Tag for this release, set after every file was read back.
        private: Refuse a repository that is public.
        public: Make the repository public at the end.
        revision: Branch to commit to; main by default.
        create_pr: Open a pull request instead of moving the branch.
        expect_parent: Refuse if the branch is at another commit.
        offline: Only run the release checks; ask and change nothing on the Hub.
        report: report.json of kconv validate; by default DIR's own.
        acceptance: acceptance.json, repeatable; by default DIR's own.
        facts: The card's facts file; by default the recipe's.
        min_acceptance: Minimum acceptance; by default the recipe's.
        metric: Its metric.
        suite: Its suite, e.g. MT-Bench, or a report's text, e.g. sampled.
        target_name: Its target, as named in acceptance.json.
        temperature: Its temperature.
        draft_tokens: Its K.
        min_prompts: Fewest prompts.
        max_loss: Largest loss against the source, as a share: 0.01 is 1 %.
        allow: Let a check pass; repeatable.
        out: A new folder for the record of the publication.
    """
