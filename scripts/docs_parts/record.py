"""Runs the demo and a few commands on what it made, and records the terminal as docs/demo.svg.

    scripts/docs record

Commands light up one after the other, each with all of its output; how long it took is left out. Nothing in the file is
loaded from elsewhere, and who asks for no motion sees all of it at once.
"""

import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "demo.svg"
# So few columns that a phone shows the text in a size to read.
TITLE, COLUMNS = "kconv", 64
PAUSE = 2.0  # seconds between commands
UNSEEN = "kconv demo demo"
HEAD = "demo/mla/trained"
# Each with the exit code that it must have.
SEEN = (
    (f"kconv validate {HEAD} --for vllm", 1),
    (f"kconv to-vllm {HEAD} head", 0),
    (f"kconv verify head {HEAD}", 0),
    ("kconv validate head", 0),
)


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    starts, line = [], 0
    with tempfile.TemporaryDirectory() as folder:
        run(UNSEEN, 0, Path(folder))
        for command, code in SEEN:
            starts.append(line)
            shown = Text.assemble(("$ ", "green"), (command, "bold")), Text.from_ansi(run(command, code, Path(folder)))
            for text in shown:
                lines = text.wrap(console, COLUMNS) if text.plain else []
                for part in lines:
                    console.print(part, no_wrap=True)
                line += len(lines)
            console.print()
            line += 1
    OUT.write_text(animated(console.export_svg(title=TITLE, theme=DIMMED_MONOKAI, unique_id="kconv"), starts))


def run(command: str, code: int, folder: Path) -> str:
    """Return what a command prints on a terminal, and on stderr where it is to fail; exit if it ends otherwise."""
    print(f"$ {command}", file=sys.stderr)
    own = {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    own["PATH"] = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    own["KCONV_CACHE"] = os.environ.get("KCONV_CACHE", str(ROOT / ".cache"))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=os.environ | own, stdout=theirs, stderr=subprocess.PIPE
    ) as running:
        os.close(theirs)
        said = b""
        while part := _read(ours):
            said += part
        assert running.stderr is not None
        failed = running.stderr.read()
    os.close(ours)
    if running.returncode != code:
        sys.exit(f"exit code {running.returncode}, and not {code}: {failed.decode()}")
    return (said + (failed if running.returncode else b"")).decode().replace("\r\n", "\n").rstrip()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's way to say that the other side has closed
        return b""


def animated(svg: str, starts: list[int]) -> str:
    """Let each command appear in its turn, and take out the fonts that would be fetched."""
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", "font-family: ui-monospace, Menlo, Consolas, monospace;", svg)

    def delayed(found: re.Match[str]) -> str:
        turn = sum(start <= int(found[2]) for start in starts) - 1
        # The first is there from the start, and the others are dim: a still picture is no black screen.
        return f'<text class="turn" style="animation-delay: {turn * PAUSE:g}s" {found[1]}' if turn else found[0]

    svg = re.sub(r'<text ((?:[^>]*)clip-path="url\(#kconv-line-(\d+)\)")', delayed, svg)
    svg = re.sub(r'<text class="turn"([^>]*) class="([^"]*)"', r'<text class="turn \2"\1', svg)
    motion = (
        "@keyframes turn { from { opacity: 0.25 } to { opacity: 1 } }\n"
        "    @media (prefers-reduced-motion: no-preference) { .turn { animation: turn 0.2s both } }\n    </style>"
    )
    return svg.replace("</style>", motion, 1)


if __name__ == "__main__":
    main()
