"""A user's own table of images: their bytes, as Hugging Face's files have them, or the names of their files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayfl.data.datasets import Dataset, Examples, Field
from rayfl.data.sources.conversion import dataset
from rayfl.data.sources.images import Channels, ImageSide, decoded
from rayfl.data.sources.table_columns import TableColumns, TableSource, is_text
from rayfl.data.sources.table_labels import labels_of
from rayfl.data.sources.table_notices import note_texts
from rayfl.errors import RayflError
from rayfl.limits.regular_files import expanded, files_below
from rayfl.settings import shown


class ImageTable(TableSource):
    """A table with an image, a label and perhaps an owner in each row, such as a dataset of Hugging Face's.

    The column `image` has the bytes of image files, tables of `bytes` and `path` (Hugging Face's Parquet files and
    saved datasets), or names of files below `image_folder` (a CSV or Parquet file, a list of JSON, tables of `path`).
    Class names in Hugging Face's files are kept.
    """

    name = "image-table"
    image: str = Field(default="image", description="the column of images, or of the names of their files")
    image_folder: str | None = Field(
        default=None, description="the folder of the files that the table names; default: data.path, if it is a folder"
    )
    side: ImageSide = None
    channels: Channels = 3
    augment: bool = Field(default=False, description="crop and flip train batches at random")

    def texts(self) -> tuple[str, ...]:
        return (self.image,)

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a column is missing, or if an image cannot be decoded."""
        train, test = self.read()
        rows, test_rows = (split and self._rows(split, train) for split in (train, test))
        assert rows is not None
        classes = () if self.named_labels else train.class_names(self.labels)
        note_texts(train, [], self.split)
        examples = dataset(self.name, self.path, rows, test_rows, self.test_share, kind="image", classes=classes)
        return replace(examples, augment=self.augment)

    def _rows(self, columns: TableColumns, train: TableColumns) -> Examples:
        paths, contents = self._images(columns)
        images = decoded(paths, self.side, self.channels, contents)
        return Examples(images, labels_of(self, columns, train), self.owners_of(columns), columns.path)

    def _images(self, columns: TableColumns) -> tuple[list[Path], Sequence[bytes] | None]:
        """The path of each image, and its bytes if the table has them."""
        column = columns.raw(self.image)
        kind = column.type
        if pa.types.is_struct(kind) and kind.get_field_index("path") >= 0 and _has_no_bytes(column):
            # Hugging Face's files name images that were not written into them.
            column = column.field("path")
            kind = column.type
        if is_text(kind):
            names: list[str | None] = column.to_pylist()
            if (lacking := next((row for row, name in enumerate(names) if not name), None)) is not None:
                raise RayflError(
                    f"{columns.path} has no image in column {self.image!r} of row {lacking} (counted from 0); drop it"
                )
            home = expanded(self.image_folder or columns.path)
            if not home.is_dir():
                raise RayflError(
                    f"{columns.path} has names of images in column {self.image!r}; set data.image_folder to the folder "
                    f"of {shown(names[0])}"
                )
            return _named(home, [name for name in names if name]), None
        if self.image_folder is not None:
            raise RayflError(f"{columns.path} has the images of column {self.image!r} itself; remove data.image_folder")
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            column = column.field("bytes")
        elif not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise RayflError(
                f"{columns.path} has a column {self.image!r} of type {kind}; give data.image a column with the bytes "
                "of images, or with the names of their files"
            )
        # Any: bytes, or None.
        contents: list[Any] = column.to_pylist()
        if None in contents:
            raise RayflError(
                f"{columns.path} has no image in column {self.image!r} of row {contents.index(None)} (counted from 0); "
                "drop the row, or write the table with the bytes of its images"
            )
        return [Path(f"{columns.path}, row {row}") for row in range(len(contents))], contents


# Any: an array of pyarrow.
def _has_no_bytes(column: Any) -> bool:
    """Whether a column of tables has the bytes of no image."""
    where = column.type.get_field_index("bytes")
    return where < 0 or column.field("bytes").null_count == len(column) > 0


def _named(home: Path, names: Sequence[str]) -> list[Path]:
    """The files of these names below `home`; a name may lack its ending (FLamby's), or be of Windows."""
    if names and "\\" in names[0] and not (home / names[0]).exists():
        names = [name.replace("\\", "/") for name in names]
    paths = [home / name for name in names]
    if paths and not paths[0].exists() and not paths[0].suffix:
        with_ending = {file.with_suffix(""): file for file in files_below(home)}
        paths = [with_ending.get(path, path) for path in paths]
    return paths
