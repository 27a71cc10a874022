"""The recipes and grids that are installed with the package, by name."""

import difflib
import os
from pathlib import Path

from pkmlm.errors import UserError
from pkmlm.recipe.nodes import yaml_text

# Inside the installed package or, in a checkout, beside it.
RECIPES = next(folder / "recipes" for folder in Path(__file__).parents[1:3] if (folder / "recipes").is_dir())


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe or grid: `name` itself or, if that does not exist or is a folder, the one of that name in
    `RECIPES` ("demo", "pkm/cpu", "pkm/grids/table-2").
    """
    path = Path(name)
    shipped = RECIPES / f"{name}.yaml"
    nothing = not os.path.exists(path) or os.path.isdir(path)
    elsewhere = path.is_absolute() or ".." in path.parts
    return shipped if nothing and not elsewhere and os.path.isfile(shipped) else path


def find_base(inheritor: Path, name: str) -> Path:
    """The file that a recipe or grid names as its base: beside it, or the one of that name in `RECIPES`."""
    name = os.path.expanduser(name)
    beside, shipped = inheritor.parent / name, find_recipe(name)
    return beside if os.path.isfile(beside) or shipped == Path(name) else shipped


def recipe_text(path: Path) -> str:
    """The text of a recipe or grid.

    Raises:
        UserError: see `yaml_text`; if there is no such file, the hint suggests similar names.
    """
    try:
        return yaml_text(path)
    except UserError as error:
        if os.path.lexists(path):
            raise
        message = error.message
    files = path.parent.glob("*.yaml") if os.path.isdir(path.parent) else ()
    beside = {file.stem: str(file) for file in files}
    known = {name: name for name in shipped_names()} | beside
    near = [known[name] for name in difflib.get_close_matches(path.stem, known)]
    near += [known[name] for name in difflib.get_close_matches(str(path), known)]
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}?"
    hint = meant if near else "`pkmlm recipe list` lists those that come with pkmlm"
    raise UserError(message, hint)


def shipped_names() -> list[str]:
    """The names of all recipes and grids in `RECIPES`, sorted by folder."""
    files = sorted(RECIPES.rglob("*.yaml"), key=lambda file: (file.parent, file.name))
    return [file.relative_to(RECIPES).with_suffix("").as_posix() for file in files]
