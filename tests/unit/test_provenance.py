"""Files are there as a whole or not at all; hashes tell contents apart, and nothing else."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from specdraft.config import UserError
from specdraft.provenance import atomic_path, hash_file, hash_json, hash_tensors, provenance, require_disk, write_json


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
