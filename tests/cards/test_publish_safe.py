"""What an attacker would have published: secrets, code, what lies elsewhere, and what changed after the gate looked."""

import json
import os

import pytest
from support.release_faults import candidate, found, record
from support.releases import REPO, publish, write_release

from kconv.cards.publish import release as release_module
from kconv.cards.publish.gate import judge
from kconv.cards.publish.options import PublishOptions
from kconv.cards.publish.release import PNG
from kconv.cards.publish.run import prepare
from kconv.cards.publish.run import publish as run
from kconv.cards.publish.secrets import find_secrets
from kconv.errors import PublishRefused

# Each put together here, so that no scanner takes this file for a leak.
HF, LETTERS = "hf" + "_", "aB3" * 12
SECRETS = {
    "the Hub's token": HF + LETTERS,
    "the Hub's token behind a letter": "X_" + HF + LETTERS,
    "the Hub's organization token": "api_" + "org_" + LETTERS,
    "GitHub": "ghp" + "_" + LETTERS,
    "GitHub, fine-grained": "github_" + "pat_" + LETTERS,
    "GitLab": "glpat" + "-" + LETTERS[:20],
    "GitLab, a runner": "GR" + "1348941" + LETTERS[:20],
    "npm": "//registry.npmjs.org/:_auth" + "Token=npm" + "_" + LETTERS,
    "npm, a legacy token": "//registry.npmjs.org/:_auth" + "Token= 01234567-89ab-cdef-0123-456789abcdef",
    "a JSON web token": "eyJ" + "hbGciOiJIUzI1NiJ9" + ".eyJ" + "zdWIiOiIxIn0.c2lnbmF0dXJl",
    "OpenAI, a project's": "sk" + "-proj-" + LETTERS[:20] + "T3Blbk" + "FJ" + LETTERS[:20],
    "AWS": "AKIA" + "ABCDEFGHIJKLMNOP",
    "NVIDIA": "nvapi" + "-" + LETTERS,
    "OpenAI": "sk" + "-" + LETTERS,
    "Slack": "xoxb" + "-123456789012-" + LETTERS[:24],
    "Google": "AIza" + LETTERS[:35],
    "an RSA key": "-----BEGIN RSA PRIVATE " + "KEY-----\nMII",
    "an OpenSSH key": "-----BEGIN OPENSSH PRIVATE " + "KEY-----\nb3B",
    "a password in an address": "https://" + "me:secret" + "@host.org/x",
}
CHANGED = ["README.md", "NOTICE", "config.json", "report.json", "kconv.json", "model.safetensors"]
FILES = ["NOTICE", "LICENSE-x", "NOTICE.MD", "COPYING.txt", "THIRD_PARTY.md", "a.png"]


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_each_kind_of_secret_is_found(secret):
    for text in (secret, f"x{secret}", f'{{"key": "{secret}"}}'):
        assert find_secrets(text.encode()), text
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        assert find_secrets(secret.encode(encoding)), encoding


@pytest.mark.parametrize("spaces", [0, 1, 9])
def test_a_secret_behind_any_number_of_spaces_is_found(spaces):
    assert find_secrets(("ibm_api_key" + spaces * " " + "=" + spaces * " " + "a1B2" * 11).encode())


@pytest.mark.parametrize("name", FILES)
def test_a_token_is_found_in_any_file_that_is_no_weights(folder, name):
    (folder / name).write_bytes((PNG if name.endswith(".png") else b"") + SECRETS["the Hub's token"].encode())
    assert "P114" in found(folder)


def test_what_a_head_and_its_evidence_say_is_no_secret(folder):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            assert find_secrets(file.read_bytes()) == [], file


NAMES = (
    "pytorch_model.bin", "evil.pkl", "modeling_evil.py", "evil.so", ".env", ".gitattributes", ".netrc", "secret.cfg",
    "id_rsa", "NOTICE.exe", "LICENSE.pkl", "COPYING.sh", "NOTICE.env", "LICENSE.key", "THIRD_PARTY.html", ".x.png",
    "x.ipynb", "run.sh", "model.gguf", "model.ckpt", "README.md.bak", "config.json.py",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("listed", [True, False], ids=["in the manifest", "beside it"])
def test_what_is_of_no_kind_of_a_release_is_refused_whoever_lists_it(folder, name, listed):
    if listed:
        record(folder, name, b"whatever")
    else:
        (folder / name).write_bytes(b"whatever")
    assert {"P115", "P101"} & set(found(folder))
    with pytest.raises(PublishRefused):
        prepare(candidate(folder))


CODE, NAME = b"class TikTokenTokenizer: ...\n", "tokenization_kimi.py"


def as_target(folder, hub, files):
    """Have the manifest speak of a target that was quantized from a repository with these files."""
    held = json.loads((folder / "kconv.json").read_text())
    commit = hub.commit("org/target", {"config.json": b"{}", **files})
    held |= {"spec": {"kind": "target"}, "exact": False, "source": f"org/target@{commit}"}
    (folder / "kconv.json").write_text(json.dumps(held))


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(
    "files, why",
    {
        "its source's": ({NAME: CODE}, ""),
        "changed": ({NAME: CODE + b"#"}, "that differs from org/target@"),
        "not there": ({}, "that differs from org/target@"),
    }.values(),
)
def test_a_targets_code_is_published_where_it_is_its_sources_byte_for_byte(folder, hub, files, why):
    as_target(folder, hub, files)
    record(folder, NAME, CODE)
    said = [finding.message for finding in judge(candidate(folder)) if finding.rule == "P115"]
    assert len(said) == bool(why) and all(why in one for one in said)


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("source", ["org/target@main", "../target", "org/other@" + "0" * 40])
def test_code_of_a_source_that_nothing_pins_or_the_card_does_not_name_is_refused(folder, hub, source):
    as_target(folder, hub, {NAME: CODE})
    held = json.loads((folder / "kconv.json").read_text()) | {"source": source}
    (folder / "kconv.json").write_text(json.dumps(held))
    record(folder, NAME, CODE)
    assert "P115" in found(folder)


def test_a_pipe_or_a_device_in_the_folder_is_refused_and_not_waited_for(folder):
    os.mkfifo(folder / "NOTICE")
    (folder / "COPYING").symlink_to("/dev/zero")
    assert found(folder).count("P103") == 2


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("how", ["written over", "put in its place"])
@pytest.mark.parametrize(
    "name", ["README.md", "NOTICE", "config.json", "report.json", "kconv.json", "model.safetensors"]
)
def test_what_changes_after_the_gate_is_not_uploaded(hub, folder, name, how):
    (folder / "NOTICE").write_text("a notice")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    approved = prepare(candidate(folder))
    other = folder.parent / "other"
    other.write_bytes(SECRETS["the Hub's token"].encode() + before[name])
    if how == "written over":
        (folder / name).write_bytes(other.read_bytes())
    else:
        other.replace(folder / name)
    run(approved, PublishOptions(repo=REPO, tag="v1"), lambda _: None)
    held = hub.repos[REPO]
    for commit in held.commits.values():
        assert not set(commit) - set(before) - {".gitattributes"}
        assert all(commit[file] == before[file] for file in commit if file in before)


@pytest.mark.usefixtures("waits")
def test_large_weights_that_change_after_the_gate_are_refused(hub, folder, monkeypatch):
    monkeypatch.setattr(release_module, "HELD", 100)
    approved = prepare(candidate(folder))
    [weights] = [file for file in approved.files if file.name == "model.safetensors"]
    assert weights.content == (folder / "model.safetensors").absolute()
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(PublishRefused, match="changed after it was checked"):
        run(approved, PublishOptions(repo=REPO, tag="v1"), lambda _: None)
    assert bytes(data) not in [
        content for held in hub.repos.values() for c in held.commits.values() for content in c.values()
    ]
    assert bytes(data) not in hub.objects.values()


@pytest.mark.usefixtures("waits")
def test_large_weights_are_published_as_they_are(hub, folder, monkeypatch):
    monkeypatch.setattr(release_module, "HELD", 100)
    publish(folder)
    held = hub.repos[REPO]
    assert held.commits[held.tags["v1"]]["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_nothing_is_left_of_the_copy_that_was_judged(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    made = candidate(folder)
    assert list((tmp_path / "temporary").iterdir()) and made.folder != folder
    del made
    (folder / "report.json").write_text("{")
    with pytest.raises(Exception, match=r"report\.json") as raised:
        candidate(folder)
    assert str(folder) in str(raised.value), "what is wrong is said of the user's file, and not of the copy"
    del raised
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_link_that_leads_out_of_the_source_is_no_license(tmp_path):
    from kconv.cards.licenses import find_texts
    from kconv.errors import LicenseUnknown

    secret = tmp_path / "id_rsa"
    secret.write_text("Apache License Version 2.0, January 2004 and a key")
    source = tmp_path / "source"
    source.mkdir()
    (source / "LICENSE").symlink_to(secret)
    with pytest.raises(LicenseUnknown, match="leads out of its folder"):
        find_texts([source])
    # As the local cache of the Hub keeps its files.
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "abc", tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("Apache License Version 2.0, January 2004")
    (snapshot / "LICENSE").symlink_to(blobs / "1")
    [text] = find_texts([snapshot])
    assert text.license.id == "apache-2.0"


def test_a_manifest_fetches_no_license_from_a_folder_that_is_not_its_source(tmp_path):
    """A stranger's kconv.json may name any folder as the source."""
    from kconv.cards.card import gather
    from kconv.cards.facts import Facts

    head = write_release(tmp_path / "head")
    private = tmp_path / "private"
    private.mkdir()
    (private / "COPYING").write_text("what nobody else shall see")
    held = json.loads((head / "kconv.json").read_text())
    (head / "kconv.json").write_text(json.dumps(held | {"source": str(private)}))
    assert gather(head, None, Facts()).source_license == ""
    (private / "config.json").write_text("{}")
    assert gather(head, None, Facts()).source_license == ""
