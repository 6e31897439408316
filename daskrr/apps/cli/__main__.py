"""``python -m daskrr.apps.cli``."""

from daskrr.apps.cli import main

main(prog_name="daskrr")
