"""Nothing in the product reads a small file, JSON or YAML around `checkpoint.schema`."""

import ast

import pytest
from support.listing import PRODUCT, ROOT

READER = "checkpoint/schema.py"
PARSERS = ("json.load", "json.loads", "yaml.load", "yaml.load_all", "yaml.safe_load", "yaml.safe_load_all")
COPIES = ("shutil.copyfile", "shutil.copy", "shutil.copy2")
METHODS = ("read_text", "read_bytes", "model_validate_json")
# By file: what is read there beside the reader, and why that is no small file of a stranger's.
ELSEWHERE = {
    "checkpoint/header.py": {"open": "a header stands at the start of a file of weights"},
    "checkpoint/bytes.py": {"open": "weights, in a stream; and what is written is read back"},
    "checkpoint/pickles.py": {"open": "where a member of an archive of weights begins"},
    "checkpoint/tensors.py": {"open": "weights"},
    "quantize/recipe.py": {"read_text": "the package's own recipes"},
    "train/recipe.py": {"read_bytes": "the package's own recipes"},
    "quantize/pack.py": {"read_text": "the package's own C, and /proc/cpuinfo"},
    "quantize/calibrate.py": {"open": "what was written here is put on the disk"},
    "quantize/stream.py": {"open": "what was written here is put on the disk"},
    "installed.py": {
        "read_text": "pip's own record of this installation",
        "json.loads": "that record",
        "read_bytes": "the package's own code",
    },
    "operations/env.py": {"read_text": "/proc/cpuinfo"},
    "targets/rows.py": {"open": "the first bytes of a file of states, whose size is known"},
    "targets/write_states.py": {
        "read_bytes": "a file of the very size of this run's own text",
        "open": "what was written here is put on the disk",
        "json.loads": "this run's own text",
    },
    "serving/start.py": {"read_text": "the log of a process that kconv started"},
    "train/generate.py": {"open": "what was written here is put in order"},
    "serving/states.py": {"open": "a lock, which holds nothing"},
    "quantize/output.py": {"shutil.copyfile": "regular files of any size, copied in a stream"},
    "checkpoint/posix.py": {"read_text": "/proc/self/statm, whose size is stated as 0"},
    "tiny/text.py": {"read_bytes": "Python's own modules"},
    "tiny/target.py": {"read_text": "what was written here", "json.loads": "what was written here"},
    "cards/publish/release.py": {"open": "weights; a copy where the disk cannot link, in a stream"},
}


def readings(file):
    """Return what a module calls to read, e.g. {"json.loads", "open"}."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        method = name.rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
        if name in PARSERS + COPIES or method in METHODS:
            found.add(name if name in PARSERS + COPIES else method)
        elif name == "open" or (method == "open" and not name.startswith(("os.", "self.", "options."))):
            mode = next((a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), "r")
            # A lock is opened to be written; what is made new holds nothing to be read.
            if not set(mode) & set("wxa"):
                found.add("open")
    return found


FILES = [str(file.relative_to(ROOT)) for file in PRODUCT]


def test_the_product_is_looked_at():
    assert len(FILES) > 100 and READER in FILES and ELSEWHERE.keys() <= set(FILES)


@pytest.mark.parametrize("file", [file for file in FILES if file != READER])
def test_a_module_reads_small_files_through_the_reader(file):
    assert readings(ROOT / file) == set(ELSEWHERE.get(file, ()))


def test_a_bypass_would_be_found(tmp_path):
    bypass = tmp_path / "bypass.py"
    bypass.write_text(
        "json.loads(file.read_bytes())\nwith file.open() as f, open(name, 'rb') as g: yaml.safe_load(f)\n"
    )
    assert readings(bypass) == {"json.loads", "read_bytes", "open", "yaml.safe_load"}
