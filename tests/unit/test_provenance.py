"""Files are there as a whole or not at all; hashes tell contents apart, and nothing else."""

import json
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specdraft.config import UserError
from specdraft.provenance import (
    atomic_path,
    hash_file,
    hash_json,
    hash_tensors,
    provenance,
    read_json,
    require_disk,
    require_writable,
    write_json,
)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text(f"half {1 / 0}")
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    for text in ("one", "two"):
        with atomic_path(tmp_path / "d") as temporary:
            temporary.mkdir()
            (temporary / text).write_text(text)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["two"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_follow_the_umask(tmp_path, umask, mode):
    """safetensors makes its files private, alone and in folders: nobody else could load a shared checkpoint."""
    before = os.umask(umask)
    try:
        with atomic_path(tmp_path / "f.safetensors") as temporary:
            save_file({"a": torch.ones(1)}, temporary)
        with atomic_path(tmp_path / "d") as temporary:
            (temporary / "deep").mkdir(parents=True)
            save_file({"a": torch.ones(1)}, temporary / "deep" / "f.safetensors")
        assert os.umask(umask) == umask, "the process's own umask is another one now"
    finally:
        os.umask(before)
    for name in ("f.safetensors", "d/deep/f.safetensors"):
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_full_or_read_only_disk_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="free some space"), atomic_path(tmp_path / "x") as temporary:
        raise OSError(28, "No space left on device")
    assert not temporary.exists()
    with pytest.raises(UserError, match=r"needs 1000000000\.0 GB"):
        require_disk(tmp_path / "deep" / "er", 10**18, "states")


def test_hashes(tmp_path):
    assert hash_json({"a": 1, "b": 2}) == hash_json({"b": 2, "a": 1}) != hash_json({"a": 2, "b": 1})
    ones = torch.ones(4)
    assert hash_tensors({"a": ones}) == hash_tensors({"a": ones.clone()})
    others = [{"b": ones}, {"a": ones.view(2, 2)}, {"a": ones.int()}, {"a": torch.tensor([1.0, 1, 1, 2])}]
    assert len({hash_tensors(tensors) for tensors in [{"a": ones}, *others]}) == 5
    (tmp_path / "f").write_bytes(b"x" * 100)
    assert len(hash_file(tmp_path / "f")) == 16


def test_provenance_names_versions_machine_and_date():
    found = provenance()
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert len(found["date"]) == 10


NOBODY = 2**22 + 1  # no process has such a number


def test_what_a_killed_process_left_is_removed(tmp_path):
    """Not what a living process writes, what somebody else named so, or what was touched just now: a file system has other machines."""
    old = [f".a.json.{NOBODY}.tmp", f".a.json.{os.getppid()}.tmp", ".a.json.mine.tmp", f".b.json.{NOBODY}.tmp"]
    folder = tmp_path / f".a.json.{NOBODY + 1}.tmp"
    folder.mkdir()
    (folder / "model.safetensors").write_text("half")
    for name in (*old, f".a.json.{NOBODY + 2}.tmp"):
        (tmp_path / name).write_text("half")
    for path in (folder / "model.safetensors", folder, *(tmp_path / name for name in old)):
        os.utime(path, (1e9, 1e9))
    write_json(tmp_path / "a.json", {})
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", *old[1:], f".a.json.{NOBODY + 2}.tmp"}


def test_what_an_earlier_process_of_the_same_number_left_is_no_hindrance(tmp_path):
    """In a container every run has the same few process numbers."""
    left = tmp_path / f".d.{os.getpid()}.tmp"
    left.mkdir()
    (left / "half").write_text("half")
    with atomic_path(tmp_path / "d") as temporary:
        temporary.mkdir()
        (temporary / "whole").write_text("whole")
    assert [path.name for path in tmp_path.rglob("*")] == ["d", "whole"]


def test_a_file_never_takes_the_place_of_a_folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="home: is a folder, allowed: a file"):
        write_json(tmp_path / "home", {})
    assert [path.name for path in tmp_path.rglob("*")] == ["home", "thesis.tex"]


def test_a_full_disk_inside_safetensors_is_one_line(tmp_path):
    """The words of safetensors 0.8 on a full tmpfs."""

    def write():
        with atomic_path(tmp_path / "x") as path:
            path.write_text("half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(UserError, match="No space left on device; free some space"):
        write()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SafetensorError, match="of its own"), atomic_path(tmp_path / "x"):
        raise SafetensorError("something of its own")


def test_where_nothing_can_be_written_is_known_before_the_work(tmp_path, monkeypatch):
    require_writable(tmp_path / "deep" / "er", "output")
    assert (tmp_path / "deep" / "er").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"output .*file/x: cannot be made"):
        require_writable(tmp_path / "file" / "x", "output")
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    with pytest.raises(UserError, match="deep: may not be written to"):
        require_writable(tmp_path / "deep", "output")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[" * 100_000, "is not JSON")],
)
def test_json_of_others(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=f"^list .*a.json: {message}.*; make it again$"):
        read_json(tmp_path / "a.json", "list", "make it again")
    write_json(tmp_path / "a.json", {"a": 1})
    assert read_json(tmp_path / "a.json", "list", "make it again", ("a",)) == {"a": 1}
    with pytest.raises(UserError, match="is no JSON object with b; make it again"):
        read_json(tmp_path / "a.json", "list", "make it again", ("b",))
