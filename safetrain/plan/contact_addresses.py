"""E-mail addresses that several answers of the data give: those of an office, not of a private person."""

from dataclasses import dataclass, field

from safetrain.core.data.rows import Row
from safetrain.core.data.secrets import mails_in, masked_mail, may_be_office
from safetrain.plan.findings import Findings

LEAST_ROWS = 3  # whose answers give an address that is published
MOST_ADDRESSES = 10_000  # that wait for a further row; beyond them, a new one is told at once


@dataclass
class _Uses:
    rows: int = 0
    where: list[str] = field(default_factory=list[str])  # the first of them


class ContactAddresses:
    """Holds addresses back until all rows are read. Only then is known in how many they stand."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._uses: dict[str, _Uses] = {}

    def of(self, row: Row, where: str) -> set[str]:
        """Addresses of a row that wait: an answer or the system text gives them, nobody who asks does."""
        given = "\n".join([message.content for message in row.messages if message.role in ("assistant", "system")])
        if "@" not in given:
            return set()
        asked = "\n".join([message.content for message in row.messages if message.role == "user"]).lower()
        mails, room = mails_in(f"{given}\n{asked}"), len(self._uses) < MOST_ADDRESSES
        held = {mail for mail in mails if may_be_office(mail) and mail not in asked and (room or mail in self._uses)}
        for mail in held:
            uses = self._uses.setdefault(mail, _Uses())
            uses.rows += 1
            alone = held == mails  # else the row is told at once
            uses.where += [where] if alone and len(uses.where) < self._findings.most_places else []
        return held

    def tell(self) -> None:
        """Once all rows are read."""
        private: dict[str, str] = {}  # of each row, the first address
        for mail, uses in self._uses.items():
            if uses.rows >= LEAST_ROWS:
                self._findings.add("CONTACT-ADDRESSES", masked_mail(mail), uses.rows, uses.where)
            else:
                private |= {where: masked_mail(mail) for where in uses.where if where not in private}
        for where, detail in private.items():
            self._findings.add("PERSONAL-DATA", detail, where=[where])
