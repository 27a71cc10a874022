"""How many operations GPUs can do at most, and which share of them a training step does (MFU)."""

from pkmlm.cost import Cost

# By torch's name of the GPU, without "NVIDIA" and what follows: 10^12 operations per second of dense matrix products
# with sums in fp32, in half precision (tensor cores) and in fp32 (without them, as torch computes it by default). From
# the vendor's data sheets, whose numbers for tensor cores are twice these where they count sparse matrices.
PEAKS = {
    "H200 NVL": (835, 60),
    "H200": (989, 67),
    "H100 NVL": (835, 60),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "GeForce RTX 4090": (165, 82.6),
    "GeForce RTX 3090": (71, 35.6),
}


def peak_of(device: str, precision: str) -> float | None:
    """Operations per second that a device can do at most; None: it is not known.

    Args:
        device: its name (`pkmlm.device.name_of`).
        precision: "fp32", "bf16" or "fp16".
    """
    name = device.removeprefix("NVIDIA ").replace("-", " ")
    for known, (half, full) in PEAKS.items():
        if f"{name} ".startswith(f"{known} "):
            return 1e12 * (full if precision == "fp32" else half)
    return None


def step_operations(cost: Cost, tokens: int) -> int:
    """Operations of a training step that moves all parameters: two for each multiply-add of the forward, and twice as
    many in the backward as in the forward (Chowdhery et al. 2022, PaLM, appendix B). Recomputed ones do not count.
    """
    return 6 * cost.flops_per_token * tokens
