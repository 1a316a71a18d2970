"""A certificate of every small recipe: the demos, and both of speech, which have dropout.

Run it as ``python tests/drills/certify_demos.py`` with PYTHONPATH=. (``make certify-demo``).
"""

import argparse
import sys
import tempfile
from pathlib import Path

from data_prep import convert
from pospre.certificate.certificate import Certificate, Request, certify, headline
from pospre.certificate.step_records import train_observed
from pospre.errors import UserError
from pospre.output import markdown_row, markdown_table
from pospre.recipe.recipe import load_recipe
from tests.conftest import write_images
from tests.data_prep.sample_clips import write_clips

YAMLS = Path(__file__).parents[2] / "yamls"
RECIPES = sorted([*(YAMLS / "demo").glob("*.yaml"), *(YAMLS / "speech").glob("demo_*.yaml")])
SMALL = ("data.batch_size=8", "data.num_workers=1", "trainer.device=cpu")
_EPILOG = """\
examples:
  python tests/drills/certify_demos.py
  python tests/drills/certify_demos.py mae dinov2 demo_supervised --kills 8

Each recipe keeps its method, model and sizes, but has one block of its encoder (Swin as it is), 32
rendered pictures or 16 spoken words, and batches of 8.

exit codes: 0 all green, 1 one is not.
"""


def main() -> int:
    """Parse the command line, certify, and print a row for each recipe."""
    parser = argparse.ArgumentParser(
        description="Certify every demo recipe: killed, and on other ranks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="of recipes; by default all")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks", default="1,2,1")
    arguments = parser.parse_args()
    ranks = tuple(map(int, arguments.ranks.split(",")))
    green = True
    with tempfile.TemporaryDirectory(prefix="pospre-certify-") as temporary:
        folder = Path(temporary)
        pictures, words = write_pictures(folder), write_words(folder)
        print(
            markdown_table(["recipe", "killed", "ranks: losses", "ranks: weights", "seconds"], [])
        )
        for path in RECIPES:
            if arguments.names and path.stem not in arguments.names:
                continue
            data = words if path.parent.name == "speech" else pictures
            overrides = (*small(path, data), f"trainer.run_folder={folder}/runs")
            request = Request(str(path), overrides, arguments.steps, 2, arguments.kills, ranks)
            try:
                certificate, _ = certify(request, train_observed)
            except UserError as error:
                print(markdown_row([path.stem, str(error), "–", "–", "–"]), flush=True)
                green = False
                continue
            print(_row(path, certificate), flush=True)
            if not certificate.is_green:
                print(headline(certificate), flush=True)
            green = green and certificate.is_green
    return 0 if green else 1


def small(path: Path, data: Path) -> tuple[str, ...]:
    """Return the overrides that make a demo as small as can be.

    Args:
        path: of the recipe.
        data: pictures, or spoken words.
    """
    recipe = load_recipe(path)
    shorter = () if recipe.encoder.name.startswith("swin") else ("encoder.depth=1",)
    is_grey = recipe.encoder.channels == 1 and recipe.encoder.name != "speech8"
    grey = ("data.mean=[0.5]", "data.std=[0.25]") if is_grey else ()
    return (f"data.path={data}", *SMALL, *shorter, *grey)


def write_pictures(folder: Path) -> Path:
    """Write 32 pictures of two classes and return their folder."""
    return write_images(folder / "pictures", 32, ("cat", "dog"))


def write_words(folder: Path) -> Path:
    """Convert 16 clips of two words and return the data set."""
    source, target = write_clips(folder / "wavs", 8), folder / "words"
    given = [str(source), str(target), "--format", "mds", "--frames", "100", "--workers", "1"]
    if convert.main(given) != 0:
        raise RuntimeError("the clips were not converted")
    return target


def _row(path: Path, certificate: Certificate) -> str:
    cells = []
    for column in certificate.columns:
        found = {verdict.property: verdict for verdict in column.verdicts}
        if column.stage.exact:
            bad = [verdict.property for verdict in column.verdicts if not verdict.holds]
            cells.append(f"RED: {', '.join(bad)}" if bad else f"equal ({', '.join(column.ends)})")
        else:
            cells += [found["losses"].text, found["parameters"].text]
    return markdown_row([f"{path.parent.name}/{path.stem}", *cells, f"{certificate.seconds:.0f}"])


if __name__ == "__main__":
    sys.exit(main())
