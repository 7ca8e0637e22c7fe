"""How the tutorial's outputs are compared: measured numbers roughly, everything else exactly."""

import pytest
from docs_parts import tutorial

ALIKE = {
    "rounding": ("logits 1e-07, top-1 100.0%", "logits 3e-08, top-1 99.9%"),
    "a measured length": ("kconv, after   2.859 ± 0.016", "kconv, after  2.851 ± 0.017"),
    "a last digit": ("prompt lookup 1.027 ± 0.003", "prompt lookup 1.024 ± 0.002"),
    "another machine's standard error": ("prompt lookup 1.031 ± 0.004", "prompt lookup 1.032 ± 0.010"),
    "the width of a table": ("mla/vllm  2.4 MB   logits", "mla/vllm   12.4 MB logits".replace("12.4", "2.5")),
    "nothing": ("head-vllm: no errors", "head-vllm: no errors"),
}
APART = {
    "a count": ("16 tensors (16 copied)", "16 tensors (15 copied)"),
    "a layer": ("outputs of layers [1, 3, 5]", "outputs of layers [0, 2, 4]"),
    "a word": ("weights: identical", "weights: NOT identical"),
    "a length far off": ("output  2.859 ± 0.016", "output  1.012 ± 0.016"),
    "a standard error of another size": ("prompt lookup 1.027 ± 0.020", "prompt lookup 1.027 ± 0.002"),
    "rounding that is none": ("logits 1e-07", "logits 2e-01"),
    "a number that is gone": ("output 2.859", "output"),
}


@pytest.mark.parametrize("old, new", ALIKE.values(), ids=ALIKE)
def test_alike(old, new):
    assert tutorial.differences([old], [new]) == []


@pytest.mark.parametrize("old, new", APART.values(), ids=APART)
def test_apart(old, new):
    assert tutorial.differences([old], [new])


def test_a_page_is_played(tmp_path):
    page = "text\n```console\n$ echo a > file\n$ cat file\nold\n$ cat gone\n[exit code 1]\n```\n```sh\n$ exit 3\n```\n"
    assert tutorial.played(page, tmp_path) == (
        "text\n```console\n$ echo a > file\n$ cat file\na\n$ cat gone\n"
        "cat: gone: No such file or directory\n[exit code 1]\n```\n```sh\n$ exit 3\n```\n"
    )


@pytest.mark.parametrize("block", ["$ false\n", "$ true\n[exit code 1]\n", "$ exit 3\n[exit code 1]\n"])
def test_a_page_does_not_learn_what_is_broken(tmp_path, block):
    with pytest.raises(SystemExit, match="did not end as the page says"):
        tutorial.played(f"```console\n{block}```\n", tmp_path)
