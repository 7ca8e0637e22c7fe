"""Real shells that run a command of kconv's, where every program only records how it was called."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROGRAMS = ("vllm", "python", "trtllm-serve", "kconv", "touch", "x")
STUB = '#!/bin/sh\nprintf \'%s\\0\' $# "${0##*/}" "$@" >> "$RECORD"\n'
# Names of heads and targets that a shell, JSON, YAML or Markdown may take for something else.
NAMES = (
    "org/head", "my head", "a/b;touch PWN;#", "$(touch PWN)", "`touch PWN`", "it's", 'say "hi"', "'; touch PWN; '",
    '", "method": "x', "two\nlines", "a\ntouch PWN\n", "-x --trust", "--help", "é/中文 \U0001f600", "back\\slash\\",
    "# note", "*", "[a]?", "~/x", "a&&touch PWN", "a|touch PWN", ">PWN", "${HOME}", "!!", "{a,b}", "tab\there",
    "```\n# Heading\n```", "````", "<img src=x>", "| a | b |\n|---|---|\n| c | d |", "a: b", "null", "{{ 7*7 }}", "%s",
    "PATH_OR_ID_OF_THE_TARGET",
)  # fmt: skip


def ran(script: str, folder: Path) -> list[list[str]]:
    """Return how a script calls programs, program and arguments of each, the same in bash and sh; it writes nothing."""
    programs, work, record = folder / "programs", folder / "work", folder / "record"
    if not programs.exists():
        programs.mkdir()
        work.mkdir()
        for name in PROGRAMS:
            (programs / name).write_text(STUB)
            (programs / name).chmod(0o755)
    calls = []
    for shell in ("/bin/bash", "/bin/sh"):
        record.write_bytes(b"")
        environment = {"PATH": str(programs), "RECORD": str(record), "HOME": "/home-of-nobody"}
        done = subprocess.run([shell, "-c", script], cwd=work, env=environment, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
        assert list(work.iterdir()) == []
        words = record.read_bytes().decode().split("\0")[:-1]
        calls.append([])
        while words:
            count = 2 + int(words[0])
            calls[-1].append(words[1:count])
            words = words[count:]
    assert calls[0] == calls[1]
    return calls[0]
