"""Documents in a column of a parquet file, read a few rows at a time."""

from collections.abc import Iterator
from typing import Any

from pkmlm.data.sources import STANDARD_INPUT, Source, Stream, spool
from pkmlm.errors import UserError

CELL_LIMIT = 128 << 20  # bytes of one cell, which must be read whole
ROWS = 64  # read at a time
BATCH_LIMIT = 512 << 20  # bytes of a batch of cells in memory; compressed, they can be far fewer


def parquet_documents(stream: Stream, field: str) -> Iterator[tuple[str, bool]]:
    """The documents in the column `field`; a null is an empty one."""
    import pyarrow
    import pyarrow.parquet

    source = stream.source
    plain = source.spool is None and source.name != STANDARD_INPUT and source.compression is None
    row = 0
    with open(source.name, "rb") if plain else spool(stream, decompress=True) as file:
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
            check_column(table.schema_arrow, field, source)
            for batch in table.iter_batches(batch_size=rows_at_once(table.metadata, field), columns=[field]):
                for cell in batch.column(field):
                    row += 1
                    yield cell_text(cell.as_py() or "", f"{source.label}: row {row:,}: {field!r}"), True
                advance(stream, row / table.metadata.num_rows)
        except MemoryError:
            raise UserError(
                f"{source.label}: the rows after row {row:,} do not fit in memory", "cut them into several", 1
            ) from None
        except UnicodeDecodeError as error:
            raise UserError(f"{source.label}: {field!r} is not UTF-8 after row {row:,} ({error.reason})") from None
        except (pyarrow.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{source.label}: not a whole parquet file: {reason}") from None
    advance(stream, 1.0)


def rows_at_once(metadata: Any, field: str) -> int:
    """How many cells of a column can be read together within BATCH_LIMIT.

    A text that many cells repeat is stored once: each cell may be as large as the whole column of its row group.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(group.num_columns)]
    largest = max((each.total_uncompressed_size for each in columns if each.path_in_schema == field), default=0)
    return max(1, min(ROWS, BATCH_LIMIT // max(1, largest)))


def cell_text(text: str, where: str) -> str:
    """The text of a cell."""
    if 4 * len(text) > CELL_LIMIT and len(text.encode()) > CELL_LIMIT:
        raise UserError(f"{where} has more than {CELL_LIMIT:,} bytes", "cut the document into several")
    return text


def check_column(schema: Any, field: str, source: Source) -> None:
    """Refuse a column that is missing, is there twice, or does not hold text."""
    import pyarrow.types as types

    if field not in schema.names:
        names = ", ".join(map(repr, schema.names[:8]))
        raise UserError(f"{source.label}: no column {field!r} (found {names})", "name the text's column with --field")
    if (times := schema.names.count(field)) > 1:
        raise UserError(f"{source.label}: {times} columns are named {field!r} (expected one)")
    found = schema.field(field).type
    value = found.value_type if types.is_dictionary(found) else found
    texts = (types.is_null, types.is_string, types.is_large_string, types.is_string_view)
    if not any(holds(value) for holds in texts):
        raise UserError(f"{source.label}: column {field!r} holds {found} (expected strings)")


def advance(stream: Stream, share: float) -> None:
    """Count and hash a file that another reads out of order, at the same pace."""
    size = stream.source.size or 0
    while stream.count < size * share and stream.read(1 << 20):
        pass
