"""Which precision is chosen, with which reason, and what bf16 does to a loss."""

import psutil
import pytest
import torch

from pkmlm.bench.models import RandomBatches
from pkmlm.device import free_bytes, free_bytes_of_cgroups, is_finite, resolve_precision
from pkmlm.errors import UserError, is_out_of_memory
from pkmlm.memory.hash.spec import HashSpec
from pkmlm.memory.product_key.spec import ProductKeySpec
from pkmlm.model.transformer import build_model
from pkmlm.recipe.schema import Train
from pkmlm.train.step import TrainState, train_step
from tests.conftest import model_2019, optim_2019, recipe_2019

OLD, ZEN4, ARM = {"avx2": True, "avx512_bf16": False}, {"avx2": True, "avx512_bf16": True}, {"neon": True, "bf16": True}


@pytest.mark.parametrize(
    ("requested", "capabilities", "precision", "reason"),
    [
        ("auto", OLD, "fp32", "auto: a CPU"),
        ("auto", ZEN4, "fp32", "auto: a CPU; train.precision=bf16 may be faster on this one"),
        ("auto", ARM, "fp32", "auto: a CPU; train.precision=bf16 may be faster on this one"),
        ("bf16", OLD, "bf16", "as the recipe asks, but slow: this CPU has no bf16 instructions"),
        ("bf16", ZEN4, "bf16", "as the recipe asks"),
        ("fp16", ZEN4, "fp16", "as the recipe asks, but slow: this CPU has no fp16 instructions"),
        ("fp32", OLD, "fp32", "as the recipe asks"),
    ],
)
def test_a_cpu_gets_the_precision_with_a_reason(monkeypatch, requested, capabilities, precision, reason):
    assert set(torch.cpu.get_capabilities()) & {"avx2", "neon"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert resolve_precision(requested, torch.device("cpu")) == (precision, reason)


# Where a rounded sign reads another bucket, losses part.
@pytest.mark.parametrize(("others", "apart"), [({}, 0.05), ({"tables": HashSpec()}, 0.25)])
def test_bf16_on_a_cpu_trains_as_fp32_does(others, apart):
    pkm = ProductKeySpec(layers=("2+",), num_keys=8, heads=2, topk=4, key_dim=16)
    model = model_2019(dim=32, layers=2, heads=2, context=16, memories={"pkm": pkm, **others})
    recipe = recipe_2019(
        model=model, optim=optim_2019(lr=3e-3, warmup_steps=5), train=Train(batch_tokens=64, micro_batch=2)
    )
    losses = {}
    for precision in ("fp32", "bf16"):
        network = build_model(recipe, 50)
        state = TrainState(recipe, network, RandomBatches(recipe, 50), precision)
        losses[precision] = torch.tensor([train_step(state, step).loss for step in range(1, 31)])
        assert all(parameter.dtype == torch.float32 for parameter in network.parameters())
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.5
    assert not torch.equal(losses["fp32"], losses["bf16"])
    assert (losses["fp32"] - losses["bf16"]).abs().max() < apart


def test_what_is_a_shortage_of_memory():
    with pytest.raises(RuntimeError) as found:
        torch.empty(10**14)
    assert is_out_of_memory(found.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("cannot allocate memory"))


def test_only_a_shortage_is_told_as_a_model_that_does_not_fit():
    with pytest.raises(UserError, match="does not fit into memory") as found:
        build_model(
            recipe_2019(model=model_2019(vocab_size=2**31 - 1, dim=2**14, ffn_dim=8, layers=1, heads=1)), 2**31 - 1
        )
    assert found.value.exit_code == 1
    with pytest.raises(NotImplementedError, match="Vulkan"):  # a RuntimeError too
        build_model(recipe_2019(model=model_2019(vocab_size=8, dim=8, layers=1, heads=1)), 8, "vulkan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype, size, number):
    x = torch.linspace(-3, 3, size, dtype=dtype)
    assert is_finite(x)
    for place in {0, size // 2, size - 1}:
        spoilt = x.clone()
        spoilt[place] = number
        assert not is_finite(spoilt)
        assert not is_finite(spoilt[:, None].expand(size, 2))


@pytest.mark.parametrize("x", [torch.empty(0, 3), torch.tensor(3), torch.tensor([True, False]), torch.tensor(2.0)])
def test_tensors_of_any_kind_may_be_finite(x):
    assert is_finite(x)


@pytest.mark.parametrize(
    ("line", "folder", "names", "unlimited"),
    [
        ("0::", "", ("memory.max", "memory.current", "inactive_file"), "max"),
        (
            "4:memory:",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            "9223372036854771712",
        ),
    ],
)
def test_what_is_free_in_a_container_is_what_its_cgroups_leave(tmp_path, line, folder, names, unlimited):
    """As the kernel writes them: the job has 2 GB, and its step, which has no limit of its own, a part of these."""
    assert free_bytes_of_cgroups(str(tmp_path)) == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpuset:/elsewhere\n{line}/job/step\n1:name=systemd:/\n")
    assert free_bytes_of_cgroups(str(tmp_path)) == []
    limit, use, file = names
    for place, most, held, dropped in (("job", "2000000000", 900, 400), ("job/step", unlimited, 300, 0)):
        here = tmp_path / "sys/fs/cgroup" / folder / place
        here.mkdir(parents=True)
        (here / limit).write_text(f"{most}\n")
        (here / use).write_text(f"{held * 10**6}\n")
        (here / "memory.stat").write_text(f"anon 5\n{file} {dropped * 10**6}\n")
    assert min(free_bytes_of_cgroups(str(tmp_path))) == 1_500_000_000
    (tmp_path / "sys/fs/cgroup" / folder / "job" / limit).write_text("100000000\n")
    assert min(free_bytes_of_cgroups(str(tmp_path))) == 0  # over its limit


def test_without_cgroups_the_memory_of_the_machine_is_free(monkeypatch):
    monkeypatch.setattr("pkmlm.device.free_bytes_of_cgroups", list)
    assert 0 < free_bytes(torch.device("cpu")) <= psutil.virtual_memory().total
