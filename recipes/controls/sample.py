"""Write the first megabytes of text files, with two empty lines between them; the last document is cut.

python recipes/controls/sample.py train-00.txt.zst --megabytes 10 -o ten.txt
"""

import argparse
from pathlib import Path

from pkmlm.data.sources import find_sources
from pkmlm.data.text import decode
from pkmlm.files import make_folder, write_text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("-o", dest="output", type=Path, required=True)
    arguments = parser.parse_args()
    wanted, text = int(arguments.megabytes * 1e6), b""
    for source in find_sources(arguments.files):
        with source.open() as stream:
            text += b"\n\n\n" * bool(text)
            for part in decode(stream):
                text += part.encode()
                if len(text) >= wanted:
                    break
    make_folder(arguments.output.parent)
    write_text(arguments.output, text[:wanted].decode(errors="ignore"))


if __name__ == "__main__":
    main()
