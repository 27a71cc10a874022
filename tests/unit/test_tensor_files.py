"""Tables in parts: whatever ranks have written is read by any others."""

import os
import stat
from pathlib import Path

import pytest
import torch

from pkmlm.distributed import World
from pkmlm.errors import UserError
from pkmlm.runs.files import writing_folder
from pkmlm.train.tensor_files import copy_tensors, part_name, parts_of, stored_names, write_tensors

TABLE = torch.arange(7 * 12.0).view(7, 12)


def write(folder: Path, parts: int) -> Path:
    """A file with a table in so many parts (1: within it) and another tensor."""
    path = folder / "weights.safetensors"
    table = {} if parts > 1 else {"table": TABLE}
    write_tensors(path, {"bias": torch.ones(3), **table})
    for part, columns in enumerate(TABLE.chunk(parts, 1) if parts > 1 else []):
        write_tensors(folder / part_name(path.name, part, parts), {"table": columns.contiguous()})
    return path


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_any_ranks_read_their_columns_of_any_parts(tmp_path, parts, size):
    path = write(tmp_path, parts)
    assert len(parts_of(path)) == (parts if parts > 1 else 0)
    for rank in range(size):
        held = {"table": torch.zeros(7, 12 // size), "bias": torch.zeros(3)}
        copy_tensors(path, held, {"table": World(rank, size)})
        assert torch.equal(held["table"], TABLE.chunk(size, 1)[rank])
        assert torch.equal(held["bias"], torch.ones(3))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_some_tensors_are_read_from_files_that_hold_others(tmp_path, parts, size):
    path = write(tmp_path, parts)
    assert stored_names(path) == {"table", "bias"}
    for rank in range(size):
        held = torch.zeros(7, 12 // size)
        copy_tensors(path, {"table": held}, {"table": World(rank, size)}, others=True)
        assert torch.equal(held, TABLE.chunk(size, 1)[rank])
    copy_tensors(path, {"bias": (bias := torch.zeros(3))}, {}, others=True)
    assert torch.equal(bias, torch.ones(3))
    for wrong, what in ((torch.zeros(4), "has shape"), (torch.zeros(3, dtype=torch.int64), "is F32")):
        with pytest.raises(UserError, match=f"tensor bias {what}"):
            copy_tensors(path, {"table": (held := torch.zeros(7, 12)), "bias": wrong}, {"table": World()}, others=True)
        assert not held.any()
    with pytest.raises(UserError, match="tensor table is not in the model" if parts == 1 else "tensor table"):
        copy_tensors(path, {"bias": bias}, {})


def test_a_missing_part_and_one_of_another_shape_are_named_before_anything_is_copied(tmp_path):
    path = write(tmp_path, 3)
    held = {"table": torch.zeros(7, 12), "bias": torch.zeros(3)}
    part = tmp_path / "weights-2-of-3.safetensors"
    write_tensors(part, {"table": torch.zeros(7, 5)})
    with pytest.raises(
        UserError, match=r"weights-2-of-3.safetensors: tensor table has shape \[7, 5\] \(expected \[7, 4\]\)"
    ):
        copy_tensors(path, held, {"table": World()})
    part.unlink()
    with pytest.raises(UserError, match=r"weights-2-of-3\.safetensors"):
        copy_tensors(path, held, {"table": World()})
    assert not held["bias"].any()


def test_files_of_tensors_have_the_permissions_of_new_ones(tmp_path, monkeypatch):
    mask = os.umask(0o027)
    try:
        with monkeypatch.context() as during, writing_folder(tmp_path / "new") as folder:
            during.delattr(os, "umask")  # the whole process's: another thread's files would have other permissions
            write(folder, 1)
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "new/weights.safetensors").stat().st_mode) == 0o640
