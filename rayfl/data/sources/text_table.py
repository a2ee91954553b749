"""A user's own table of texts with labels, for the classification of texts."""

from rayfl.data.datasets import Dataset, Examples, Field
from rayfl.data.sources.table_columns import TableColumns, TableSource, is_text
from rayfl.data.sources.table_labels import labels_of
from rayfl.data.sources.table_notices import note_texts
from rayfl.data.sources.words import Length, Vocabulary, text_dataset
from rayfl.errors import RayflError


class LabelledTexts(TableSource):
    """A table with a text, a label and perhaps an owner in each row; inputs are the tokens [length] of its words.

    Words are runs of letters, digits and apostrophes, in lower case. Class names of Hugging Face's files are kept.
    vocabulary: the number of token numbers: 0 is padding, 1 any other word, and 2 onwards the most frequent words of
    train, equally frequent ones in alphabetical order.
    length: tokens of a text; longer texts lose their end, shorter ones are padded with 0 at the end.
    """

    name = "text-table"
    text: str = Field(default="text", description="the column of texts")
    vocabulary: Vocabulary = 10_000
    length: Length = 256

    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    def load(self) -> Dataset:
        """Load the dataset. Raise RayflError if a column is missing, or has no texts."""
        train, test = self.read()
        rows, test_rows = (split and self._rows(split, train) for split in (train, test))
        note_texts(train, [], self.split)
        assert rows is not None
        return text_dataset(
            self.name,
            self.path,
            rows,
            test_rows,
            self.test_share,
            self.vocabulary,
            self.length,
            () if self.named_labels else train.class_names(self.labels),
        )

    def _rows(self, columns: TableColumns, train: TableColumns) -> Examples:
        kind = columns.raw(self.text).type
        if not is_text(kind):
            raise RayflError(
                f"{columns.path} has a column {self.text!r} of type {kind}; give data.text a column of texts"
            )
        texts = columns.raw(self.text).fill_null("").to_numpy(zero_copy_only=False).astype(object)
        return Examples(texts[:, None], labels_of(self, columns, train), self.owners_of(columns), columns.path)
