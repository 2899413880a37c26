"""A checker for answers that are Python code, which must compile; it does not run: evaluate.checker=compiles.py

One line of JSON comes in for each answer, {"row": …, "answer": …}; one line with its score, 0 to 1, goes out.
"""

import json
import re
import sys
import warnings

warnings.simplefilter("ignore")
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)

for line in sys.stdin:
    answer = json.loads(line)["answer"]
    block = BLOCK.search(answer)
    note = "" if answer.strip() else "empty"
    try:
        compile(block[1] if block else answer, "answer", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        note = f"{type(error).__name__}: {error}"
    print(json.dumps({"score": 0.0 if note else 1.0, "note": note}), flush=True)
