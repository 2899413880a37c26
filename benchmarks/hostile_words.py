"""Words and values that bench_hostile.py puts into files, commands and environments."""

import math
from typing import Any

RAW = {"@deep@": "[" * 100_000 + "]" * 100_000, "@nested@": '{"a":' * 900 + "1" + "}" * 900, "@digits@": "9" * 5000,
       "@e400@": "1e400"}  # fmt: skip
EVIL: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 10**9, 10**18, 2**64, -(10**30), 0.5, 32768.0, 1e308, math.nan, math.inf, "",
    " ", "evil", "1", "true", "\ud800", "\x00", "\x1b[31m[/x]", "[bold]{0}%s", "\u202e\u009b", "../../etc/passwd",
    "x" * 10**6, "é" * 1000, [], {}, [[]], [None], ["a", 1, None], [1] * 1000, {"a": None}, {"": {"": []}}, *RAW,
)  # fmt: skip
TYPES = (str, repr, lambda old: [old], lambda old: {"a": old}, lambda old: [old] * 300, lambda old: None)
KEYS = ("", "a" * 10**5, "\x1b[2J", "__class__", "..", "é")
CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 2?"},
        {"role": "assistant", "content": "Two."}]  # fmt: skip
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": CHAT}, {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}, {"text": "A."},
    {"prompt": "What is 3?", "completion": "Three."}, {"question": "Which?", "answer": "That."},
    {"instruction": "Add", "input": "1 2", "output": "3"}, {"prompt": "Which?", "chosen": "This.", "rejected": "That."},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    {"prompt": CHAT[:2], "chosen": CHAT[2:], "rejected": [{"role": "assistant", "content": "No."}]},
)  # fmt: skip
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "jsonl.gz", "jsonl.zst", "txt")
BOMBS = (  # kind, size, rows; or kind and a time
    ("cells", 32 * 10**6, 2000), ("cells", 40 * 10**6, 1), ("cells", 10**5, 50_000), ("equal", 1, 20_000_000),
    ("null", 1, 50_000_000), ("date32", 2**31 - 1, 1), ("date64", 2**62 // 86_400_000 * 86_400_000, 1),
    ("timestamp[us]", 2**62, 1), ("timestamp[s]", 2**60, 1), ("duration[us]", 2**62, 1),
)  # fmt: skip
LONG = {"sk-": 10**6, "<<1": 10**5, "ghp_a1": 10**5, "a@b.": 10**5, "word ": 3 * 10**6, "\\u0000": 10**5, "1": 10**6,
        "é": 7 * 10**6, "\\ud800": 100, "<|end|>": 10**5, "\\n": 10**6, "```": 10**5, "<think>": 10**5}  # fmt: skip
REPEATED: dict[str, tuple[str, str, str, int, str]] = {  # format, head, body, times, tail
    "deep lists": ("json", "", "[", 10**6, ""), "deep objects": ("jsonl", "", '{"a":', 10**5, ""),
    "one long line": ("jsonl", '{"text":"', "x", 20 * 2**20, ""), "many columns": ("csv", "text", ",a", 10**5, "\nb"),
    "many keys": ("jsonl", '{"text":"a"', ',"é":1', 10**6, "}"), "an open quote": ("csv", 'text\n"', "a\n", 10**6, ""),
    "a bomb": ("jsonl.gz", "", '{"text":"a"}\n', 10**7, ""),
    **{text: ("jsonl", '{"prompt":"a","completion":"', text, many, '"}\n') for text, many in LONG.items()},
}  # fmt: skip
PARTS: tuple[dict[str, Any], ...] = (
    {"type": "Split", "pattern": {"Regex": "(a|a)*$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": "((.*)*)*x"}, "behavior": "Isolated", "invert": True},
    {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}, {"type": "ByteFallback"},
    {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 10**5}, {"type": "Newer"}, {"type": "NFKC"},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "e"}, "content": "ee" * 50}] * 6},
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": 3}]},
    {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
)  # fmt: skip
VALUES: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {  # of keys in files
    "tokenizer.json": (("normalizer", "pre_tokenizer", "decoder", "post_processor"), PARTS),
    "config.json": (("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"), (10**9, 10**12, 10**15)),
}  # fmt: skip
WITH_SIZE = (
    "{{{{ 'x' * {n} }}}}", "{{{{ 'x'|center({n}) }}}}", "{{{{ '%{n}d' % 1 }}}}", "{{{{ '%*d' % ({n}, 1) }}}}",
    "{{{{ ([0] * {n})|length }}}}", "{{{{ 'a'.ljust({n}) }}}}", "{{{{ '{{:>{n}}}'.format(1) }}}}",
    "{{% for a in range(99999) %}}{{% for b in range({n}) %}}{{% endfor %}}{{% endfor %}}", "{{{{ lipsum(n={n}) }}}}",
    "{{{{ ('a,' * {n}).split(',')|length }}}}", "{{{{ 'x'|indent({n}, true) }}}}", "{{{{ messages * {n} }}}}",
    "{{% set n = namespace(s='x') %}}{{% for i in range({n}) %}}{{% set n.s = n.s + n.s %}}{{% endfor %}}",
    "{{% macro f(x) %}}{{{{ f(x) }}}}{{{{ f(x) }}}}{{% endmacro %}}{{{{ f({n}) }}}}", "{{{{ range({n})|list|sum }}}}",
    "{{{{ 'x'.zfill({n})|wordwrap(1) }}}}", "{{{{ ('a' * 9999)|replace('', 'b' * {n}) }}}}", "{{{{ 10 ** {n} }}}}",
    "{{{{ [1]|batch({n}, 0)|list }}}}",
)  # fmt: skip
WITHOUT = (
    "{{ '\\ud800' }}", "\ud800", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% for %}",
    "{{ messages.append(1) }}", "{{ self._TemplateReference__context }}", "{% include '/etc/passwd' %}", "{{ 1 / 0 }}",
    "{% import 'os' as o %}", "{{ raise_exception(1) }}", "{{ raise_exception('\\ud800\\x1b[2J') }}", "{{ x.y.z }}",
    "{{ strftime_now('%Q%') }}", "{{ strftime_now(1) }}", "{{ messages[9] }}", "{{ messages|tojson(indent=-1) }}",
    "{{ messages|nothing }}", "{{ ''|attr('format') }}", "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{% generation %}a", "{{ " + "(" * 500 + ")" * 500 + " }}", "\x00\x1b[2J", "{{ " + "-" * 10**5 + "1 }}",
    "{% if 1 %}" * 2000, "{{ dict(a=dict)['a']() }}", "{{ caller() }}", "{{ messages|map('x') }}", "{{ [].pop() }}",
    "{{ messages|groupby(1) }}", "{{ joiner() }}{{ '%s' % () }}", "{{ '{0.__class__}'.format(1) }}", "{{ not_a() }}",
)  # fmt: skip
COMMANDS = ("validate", "preflight", "estimate", "set", "runs", "monitor", "result", "report", "ask", "chat",
            "fuse", "convert", "diagnose", "discard", "export")  # fmt: skip
WORDS = ("", " ", "-", "--", "-1", "0", "1e999", "9" * 20, "nan", "\udcff", "\x1b[2J", "[/x]", "a" * 5000, "/dev/zero",
         "/", ".", "..", "models/tiny", "data/tiny", "params.yaml", "--help", "{a: [", "${oc.env:HOME}", "é=ü",
         "../../etc", "[[a]]", "{a: b}", "1,2", "[" * 3000, "{" * 3000,
         *(str(each)[:9999] for each in EVIL[:21] + EVIL[23:26]), "\\0", "\udc80")  # fmt: skip
ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(12))
WHOLE = ("5", "[]", "a", "null", "{" * 3000, "[" * 5000, ALIASES, "!!python/object/apply:os.system [id]", "? [a]\n: b",
         "model: &a [*a]", "--- a\n--- b", "model: {path: &a models/tiny, create: *b}", "1: 2\nnull: 3", "<<: 5",
         "model:\n\tpath: a", "a: 2026-99-99")  # fmt: skip
AROUND = (  # for a shell, before the command
    "export HOME=", "export HOME=/nowhere SAFETRAIN_CACHE_DIR=", "export HOME=/dev/null SAFETRAIN_CACHE_DIR=",
    "export TMPDIR=/nowhere", "export SAFETRAIN_LOCK_DIR=/dev/null", "export SAFETRAIN_LOCK_DIR=/proc/a",
    "export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0", "export PYTHONIOENCODING=ascii", "export LC_ALL=xx_YY.zzz",
    "export COLUMNS=0", "export COLUMNS=a", "export FORCE_COLOR=1 TERM=$(printf '\\033')", "exec <&-", "exec >&-",
    "exec 2>&-", "exec >/dev/full", "exec 2>/dev/full", "ulimit -n 24", "ulimit -f 1", "ulimit -s 256", "umask 777",
    "ulimit -v 1572864", 'rm -r "$PWD"', "chmod 555 .", "chmod 555 checkpoints_qlora", "chmod 0 checkpoints_qlora",
    "chmod 0 models/tiny", "chmod 0 models/tiny/config.json", "chmod 0 models/tiny/model.safetensors",
    "chmod 0 data/tiny", "chmod 0 params.yaml", "chmod 0 checkpoints_qlora/*.json",
)  # fmt: skip
