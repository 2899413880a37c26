"""A checker for answers that end with a number, as in GSM8K: evaluate.checker=last_number.py

One line of JSON comes in for each answer, {"row": …, "answer": …}; one line with its score, 0 to 1, goes out.
"""

import json
import re
import sys

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


for line in sys.stdin:
    asked = json.loads(line)
    row = asked["row"]
    expected = row["completion"] if "completion" in row else row["messages"][-1]["content"]
    due, given = last_number(expected), last_number(asked["answer"])
    score, note = float(due == given), "" if due == given else f"{given} instead of {due}"
    print(json.dumps({"score": score, "note": note}), flush=True)
