"""The recipes and grids that are installed with the package, by name."""

from pathlib import Path

# Within an installed package; or beside it, in a checkout.
RECIPES = next(
    folder
    for folder in (Path(__file__).parents[1] / "recipes", Path(__file__).parents[2] / "recipes", Path())
    if folder.is_dir()
)


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe or grid: `name` itself, or, where there is no such file, the one of that name in `RECIPES`
    ("demo", "pkm/cpu", "pkm/grids/table-2").
    """
    path = Path(name)
    shipped = RECIPES / f"{name}.yaml"
    return shipped if not path.exists() and ".." not in path.parts and shipped.is_file() else path


def shipped_names() -> list[str]:
    """The names of all recipes and grids in `RECIPES`; those of a folder stand together."""
    files = sorted(RECIPES.rglob("*.yaml"), key=lambda file: (file.parent, file.name))
    return [file.relative_to(RECIPES).with_suffix("").as_posix() for file in files]
