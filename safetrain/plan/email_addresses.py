"""E-mail addresses in what is to be learnt: a few in a file are mostly contacts and examples, many are people."""

from safetrain.core.data.rows import Row
from safetrain.core.data.secrets import mails_in, masked_mail
from safetrain.plan.findings import Findings
from safetrain.plan.text_checks import text_of

FEW = 0.01  # different addresses to a row, up to which they are a note (measured: benchmarks/bench_false_alarms.py)
MOST_ADDRESSES = 10_000  # that are known again; beyond them, each counts as a different one


class EmailAddresses:
    """Holds addresses back until all rows are read. Only then is known whether they are few."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._known: set[str] = set()
        self._different, self._rows, self._detail = 0, 0, ""
        self._where: list[str] = []  # the first of the rows

    def of(self, row: Row, where: str) -> set[str]:
        """Addresses of a row that wait: those of its answers, system text or bare text that nobody who asks has."""
        given = row.text or _said_by(row, "assistant", "system")
        if "@" not in given:
            return set()
        asked, given = _said_by(row, "user").lower(), given.lower()
        mails = mails_in(text_of(row))
        held = {mail for mail in mails if mail in given and mail not in asked}
        new = held - self._known
        self._different += len(new)
        self._known |= new if len(self._known) < MOST_ADDRESSES else set()
        if mails and held == mails:  # else the row is told at once
            self._rows += 1
            self._detail = self._detail or masked_mail(min(held))
            self._where += [where] if len(self._where) < self._findings.most_places else []
        return held

    def tell(self, rows: int) -> None:
        """Once all ``rows`` are read."""
        if self._rows:
            kind = "EMAIL-ADDRESSES" if self._different <= FEW * rows else "PERSONAL-DATA"
            self._findings.add(kind, self._detail, self._rows, self._where)


def _said_by(row: Row, *roles: str) -> str:
    return "\n".join([message.content for message in row.messages if message.role in roles])
