"""Packaging of pkmlm."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "pkmlm/__init__.py").read_text())[1]

setup(
    name="pkmlm",
    version=VERSION,
    description="Train and measure language models with product-key memories and MemoryFormer hash tables",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=[*find_packages(include=["pkmlm", "pkmlm.*"]), "pkmlm.recipes"],
    package_dir={"pkmlm": "pkmlm", "pkmlm.recipes": "recipes"},
    package_data={
        "pkmlm": ["py.typed", "manual/*.md"],
        "pkmlm.report": ["page/*"],
        "pkmlm.recipes": ["schema.json", "*.yaml", "*/*.yaml", "*/grids/*.yaml", "demo/*.zst"],
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<3",
        "numba>=0.62,<1",
        "numpy>=1.26,<3",
        "click>=8.4.2,<9",
        "sentencepiece>=0.2.3,<0.3",
        "tokenizers>=0.22,<0.24",
        "rich>=14.3.2,<16",
        "pyyaml>=6.0,<7",
        "safetensors>=0.5,<1",
        "zstandard>=0.22,<1",
        "pyarrow>=24,<27",
        "matplotlib>=3.8,<4",
        "psutil>=5.9,<8",
        "lm-eval>=0.4.13,<0.5",
        "datasets>=5.2,<6",
        "huggingface-hub>=1.31,<3",
        "jinja2>=3.1,<4",
        "pydantic>=2.11,<3",
        "typing-extensions>=4.12,<5",
    ],
    extras_require={
        "hf": ["transformers>=5.1,<6"],
        "sinks": ["tensorboard>=2.18,<3", "wandb>=0.17,<1"],
        "dev": [
            "pytest>=8,<10",
            "pytest-xdist>=3.6.1,<4",
            "hypothesis>=6.100,<7",
            "jsonschema>=4.21,<5",
            "ruff>=0.14,<1",
            "mypy>=1.15,<3",
            "types-PyYAML>=6,<7",
            "transformers>=5.1,<6",
            "accelerate>=1.1,<2",
            "peft>=0.21,<1",
            "tensorboard>=2.18,<3",
        ],
    },
    entry_points={
        "console_scripts": ["pkmlm = pkmlm.cli:main"],
        "lm_eval.models": ["pkmlm = pkmlm.evaluate.lm_eval:PkmLM"],
    },
)
