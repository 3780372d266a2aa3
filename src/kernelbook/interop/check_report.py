"""What a check of a whole model found: rows, and the table that they are printed as."""

import dataclasses
import math

from kernelbook import check

WIDTH = 60  # of names in the table
SHOWN = 5  # of the gradients that are right, the largest errors


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: ``what`` (output, gradient, input, loss, ...) of ``name`` in a ``trial``, its error and the limit."""

    trial: str
    what: str
    name: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit

    @property
    def ratio(self) -> float:
        """Error over limit; infinity where there is no number."""
        ratio = self.error / self.limit if self.limit > 0 else math.inf
        return math.inf if math.isnan(ratio) else ratio

    def __str__(self) -> str:
        note = f"  {self.note}" if self.note else ""
        return f"{self.trial:12}  {self.what:12}  {self.name:{WIDTH}}  {self.error:9.2e}  {self.limit:9.2e}{note}"


@dataclasses.dataclass
class Report:
    """What ``check.model`` found. Printed it is a table: what is wrong, the largest first, and a count of what is right.

    Attributes:
        reference: what the model was compared with, in words.
        rows: all comparisons.
        notes: what is no error and should be known, such as experts that no row of the batch reached.
        trial: to which the rows belong that are added.
    """

    reference: str
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    trial: str = "as given"

    @property
    def wrong(self) -> list[Row]:
        """The rows that are not right, the largest first."""
        return sorted((row for row in self.rows if not row.passed), key=lambda row: -row.ratio)

    @property
    def ok(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        lines = [f"compared with {self.reference}", ""]
        for trial in dict.fromkeys(row.trial for row in self.rows):
            of_trial = [row for row in self.rows if row.trial == trial]
            counts = []
            for what in dict.fromkeys(row.what for row in of_trial):
                found = [row.passed for row in of_trial if row.what == what]
                counts.append(f"{what} {sum(found)} of {len(found)}")
            lines.append(f"{trial:12}  right: {', '.join(counts)}")
        head = f"{'trial':12}  {'what':12}  {'where':{WIDTH}}  {'error':9}  {'limit':9}"
        if self.wrong:
            lines += ["", "WRONG, the largest first", head, *map(str, self.wrong)]
        gradients = [row for row in self.rows if row.passed and row.what == "gradient"]
        if gradients:
            gradients.sort(key=lambda row: -row.ratio)
            lines += ["", "right, gradients nearest to their limit", head, *map(str, gradients[:SHOWN])]
        lines += ["", *(f"note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join([*lines, "", "Something is wrong." if self.wrong else "All is right."])

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def add(self, what: str, name: str, error: float, limit: float, note: str = "") -> None:
        """Add a comparison."""
        self.rows.append(Row(self.trial, what, name, error, limit, note))

    def judge(self, what: str, name: str, verdict: check.Verdict, note: str = "") -> None:
        """Add the outcome of a comparison by the rule."""
        if verdict.passed or not verdict.error <= verdict.limit:
            self.add(what, name, verdict.error, verdict.limit, note)
        else:
            note = f"{note} an element is off by {verdict.element:.1f} times what is allowed".strip()
            self.add(what, name, verdict.element, 1.0, note)

    def fail(self, what: str, name: str, note: str) -> None:
        """Add what is wrong without a number."""
        self.add(what, name, math.inf, 0.0, note)
