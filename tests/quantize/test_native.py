"""The compiled packer is run as the user, so it comes from nobody else."""

import os
import shutil
import subprocess

import pytest

from kconv.quantize import pack

pytestmark = pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
EVIL = '#include <stdio.h>\n__attribute__((constructor)) void run(void) { fclose(fopen("%s", "w")); }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of one's own, in which the packer was compiled; the system loads one name once, so it was not loaded."""
    monkeypatch.setenv("KCONV_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as unloaded:
        unloaded.setattr(pack.ctypes, "CDLL", lambda name: name)
        assert pack.load_native("pack.c")
    [library] = (tmp_path / "cache" / "native").glob("pack-*.so")
    return library


def plant(library, marker):
    """Put a library that leaves a mark where it is loaded in the place of the packer's."""
    library.unlink()
    source = library.with_suffix(".c")
    source.write_text(EVIL % marker)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)


def test_a_planted_library_is_run_from_a_cache_of_ones_own(cache, tmp_path):
    """Which shows that the mark is left where the library is loaded."""
    plant(cache, tmp_path / "ran")
    pack.load_native("pack.c")
    assert (tmp_path / "ran").exists()


def others_may_write(folder):
    folder.chmod(0o777)


def of_somebody_else(folder):
    os.chown(folder, 65534, 65534)


@pytest.mark.parametrize("give_away", [others_may_write, of_somebody_else])
@pytest.mark.parametrize("which", ["the library", "its folder", "the folder above"])
def test_a_library_that_others_may_have_put_there_is_not_run(cache, tmp_path, give_away, which):
    if give_away is of_somebody_else and os.geteuid() != 0:
        pytest.skip("only root gives a file away")
    plant(cache, tmp_path / "ran")
    give_away({"the library": cache, "its folder": cache.parent, "the folder above": cache.parent.parent}[which])
    library = pack.load_native("pack.c")
    assert library and library.nvfp4_pack_bf16, "it was compiled for this process alone"
    assert not (tmp_path / "ran").exists()


def test_a_link_to_a_folder_of_others_is_followed_by_nobody(cache, tmp_path):
    plant(cache, tmp_path / "ran")
    folder = cache.parent
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    folder.rename(shared / "native")
    folder.symlink_to(shared / "native")
    assert pack.load_native("pack.c") and not (tmp_path / "ran").exists()
