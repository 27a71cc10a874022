"""Options that several commands share."""

import click

set_option = click.option(
    "-s",
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the recipe, e.g. -s model.memory.topk=16. May be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
step_option = click.option(
    "--step",
    default="latest",
    show_default=True,
    metavar="latest|best|N",
    help="Which checkpoint of the run to read.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
