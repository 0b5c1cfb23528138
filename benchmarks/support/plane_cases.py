"""The batches that the data plane's benchmark moves: jagged rows, two sizes, two numbers of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.data_plane import fields
from penstock.data_plane.columns import JaggedColumn
from penstock.data_plane.field_spec import FLOATING

FEW: tuple[str, ...] = (fields.INPUT_IDS, fields.TOKEN_MASK, fields.GENERATION_LOGPROBS)
MANY: tuple[str, ...] = (
    *FEW,
    fields.TOKEN_VERSIONS,
    fields.KEPT_COUNTS,
    fields.KEPT_IDS,
    fields.REFERENCE_LOGPROBS,
    fields.OLD_LOGPROBS,
)


@dataclass(frozen=True)
class Case:
    """One size of batch: rows of about `tokens` tokens, with the named per-token columns."""

    rows: int
    tokens: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens}, {len(self.names)} columns"


LARGE_ROWS = 512
CASES = tuple(Case(rows, tokens, names) for rows, tokens in ((64, 1024), (LARGE_ROWS, 4096)) for names in (FEW, MANY))


@dataclass(frozen=True)
class Batch:
    """The columns of a case, the same in every repeat."""

    case: Case
    columns: dict[str, JaggedColumn]

    @classmethod
    def of(cls, case: Case) -> Batch:
        """Lengths spread by a quarter around the mean, values of each column's own dtype."""
        rng = torch.Generator().manual_seed(0)
        lengths_R = torch.randint(case.tokens * 3 // 4, case.tokens * 5 // 4, (case.rows,), generator=rng)
        offsets_R1 = torch.zeros(case.rows + 1, dtype=torch.int64)
        torch.cumsum(lengths_R, 0, out=offsets_R1[1:])
        total = int(offsets_R1[-1])
        columns = {}
        for name in case.names:
            kind = fields.SPECS[name].dtype
            dtype = torch.float32 if kind == FLOATING else getattr(torch, str(kind))
            drawn = torch.randint(50_000, (total,), generator=rng)
            columns[name] = JaggedColumn(drawn.to(dtype), offsets_R1)
        return cls(case, columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(column.values.nbytes for column in self.columns.values())

    @property
    def checksum(self) -> int:
        """What a reader must find: the sum of the token ids."""
        return int(self.columns[fields.INPUT_IDS].values.sum())

    def sample_ids(self, group: str) -> Sequence[str]:
        """Ids of the rows as one put writes them."""
        return [fields.sample_id(group, row) for row in range(self.case.rows)]
