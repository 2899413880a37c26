"""Written by hand from the templates: how each family opens and closes a turn, and each model's stop tokens."""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """How the templates of a family write a turn.

    ``opens`` are expressions for what stands before a turn, ``closes`` the tokens that end one, ``nexts`` expressions
    for what can follow it; ``between`` is a role opening that the template writes in the middle of a turn.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    nexts: tuple[str, ...]
    between: str = ""
    gap: str = ""  # another message, written in the middle of a turn
    specials: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """What the folder of a model says beside its template."""

    family: Family
    bos: str | None
    eos: str
    stops: tuple[str, ...] = ()  # of generation_config.json, beside eos
    plain: bool = False  # control words are text in this model, not tokens of their own
    extra: tuple[str, ...] = ()  # additional_special_tokens, in this order

    @property
    def all_stops(self) -> tuple[str, ...]:
        """Every token that ends generation."""
        return (self.eos, *(stop for stop in self.stops if stop != self.eos))


# fmt: off
CHATML = Family((r"<\|im_start\|>assistant\n",), ("<|im_end|>",), (r"<\|im_start\|>",))
LLAMA3 = Family((r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n",), ("<|eot_id|>", "<|eom_id|>"),
    (r"<\|start_header_id\|>",))
GEMMA = Family((r"<start_of_turn>model\n",), ("<end_of_turn>",), (r"<start_of_turn>",), specials=("<start_of_turn>",
    "<end_of_turn>"))
GEMMA4 = Family((r"<\|turn>model\n", r"<tool_response\|>"), ("<turn|>",), (r"<\|turn>", r"<\|tool_response>"),
    gap=r"<\|tool_response>.*?<tool_response\|>", specials=("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", "<|tool>", "<tool|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'))
MISTRAL_WORDS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]",
    "[/THINK]")
MISTRAL = Family((r"\[/INST\]", r"\[/TOOL_RESULTS\]", r"\[/SYSTEM_PROMPT\]"), ("</s>",), (r"\[INST\]",
    r"\[AVAILABLE_TOOLS\]", r"\[TOOL_RESULTS\]"), specials=MISTRAL_WORDS)
LLAMA2 = replace(MISTRAL, specials=())
COHERE = Family((r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>",), ("<|END_OF_TURN_TOKEN|>",),
    (r"<\|START_OF_TURN_TOKEN\|>",))
DEEPSEEK = Family((r"<｜Assistant｜>", r"<｜tool▁outputs?▁end｜>", r"</function_results>\n\n"),
    ("<｜end▁of▁sentence｜>",), (r"<｜User｜>", r"<｜Assistant｜>",
    r"<｜tool▁outputs?▁begin｜>", r"\n\n<function_results>"))
DEEPSEEK2 = Family((r"Assistant:",), ("<｜end▁of▁sentence｜>",), (r"User:", r"Assistant:"))
CODER = Family((r"### Response:\n",), ("<|EOT|>",), (r"### (?:Instruction|Response):",))
GLM = Family((r"<\|assistant\|>",), (), (r"<\|(?:user|observation|system|assistant|tool)\|>",), specials=("<|user|>",
    "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"))
GRANITE = Family((r"<\|start_of_role\|>assistant<\|end_of_role\|>",), ("<|end_of_text|>",), (r"<\|start_of_role\|>",))
LING = Family((r"<role>ASSISTANT</role>",), ("<|role_end|>",), (r"<role>",), specials=("<role>", "</role>"))
MEGREZ = Family((r"<\|role_start\|>assistant<\|role_end\|>",), ("<|turn_end|>",), (r"<\|role_start\|>",))
MINICPM = Family((r"<AI>",), (), (r"<用户>",), specials=("<用户>", "<AI>"))
MONARCH = Family((r"<s>assistant\n",), ("</s>",), (r"<s>",))
ORION = Family((r"Assistant: </s>",), ("</s>",), (r"Human: ",))
PHI3 = Family((r"<\|assistant\|>\n",), ("<|end|>",), (r"<\|(?:user|assistant|system|tool)\|>",), specials=("<|user|>",
    "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"))
PHI4 = Family((r"<\|im_start\|>assistant<\|im_sep\|>",), ("<|im_end|>",), (r"<\|im_start\|>",))
YANDEX = Family((r" Ассистент:",), (), (r" Пользователь:", r"\n\nРезультат", r" Ассистент:"), specials=("[SEP]",))
APERTUS = Family((r"<\|assistant_start\|>", r"<\|tools_suffix\|>\[\{.*?\}\]"), ("<|assistant_end|>",
    "<|tools_suffix|>"), (r"<\|user_start\|>",))
APRIEL = Family((r"<\|(?:begin_)?assistant\|>\n",), ("<|end|>",), (r"<\|(?:begin_)?(?:user|tool_result)\|>",
    r"\n*<\|begin_assistant\|>"))
SEED = Family((r"<seed:bos>assistant\n",), ("<seed:eos>",), (r"<seed:bos>",), specials=("<seed:bos>", "<seed:eos>",
    "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"))
GIGACHAT = Family((r"assistant<\|role_sep\|>\n?",), ("<|message_sep|>",),
    (r"(?:user|function result|assistant)<\|role_sep\|>",), between=r"\n\nfunction call<\|role_sep\|>\n")
KIMI = Family((r"<\|im_assistant\|>assistant<\|im_middle\|>",), ("<|im_end|>",),
    (r"<\|im_(?:user|system|assistant)\|>",))
KIMI3 = Family((r'<\|open\|>message role="assistant"<\|sep\|>',), ("<|end_of_msg|>",), (r"<\|open\|>message",))
MINIMAX1 = Family((r"<beginning_of_sentence>ai name=assistant\n",), ("<end_of_sentence>",),
    (r"<beginning_of_sentence>",), specials=("<beginning_of_sentence>", "<end_of_sentence>"))
MINIMAX = Family((r"\]~b\]ai\n",), ("[e~[",), (r"\]~b\]",), specials=("]~!b[", "]~b]", "[e~[", "]<]minimax[>["))
NEMOTRON2 = Family((r"<SPECIAL_11>Assistant\n",), ("<SPECIAL_12>",), (r"<SPECIAL_11>",), specials=("<SPECIAL_10>",
    "<SPECIAL_11>", "<SPECIAL_12>"))
LAGUNA = Family((r"<assistant>\n?",), ("</assistant>",), (r"<user>", r"<tool_response>"), specials=("<user>", "</user>",
    "<assistant>", "</assistant>", "<system>", "</system>"))
REKA = Family((r"assistant:",), ("<sep>",), (r"human:",), specials=("<sep>",))
SPARK = Family((r"<\|Bot\|>",), ("<｜end▁of▁sentence｜>",), (r"<｜start▁of▁sentence｜>",))
HUNYUAN = Family((r"<｜hy_Assistant:opensource｜>",), ("<｜hy_eos:opensource｜>",), (r"<｜hy_User:opensource｜>",
    r"<tool_responses:opensource>"), specials=("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>",
    "<｜hy_begin_of_sentence:opensource｜>"))
SOLAR = Family((r"<\|begin\|>assistant",), ("<|end|>", "<|calls|>"), (r"<\|begin\|>",), between=r"<\|begin\|>assistant")
HARMONY = Family((r"<\|start\|>assistant",), ("<|return|>", "<|end|>", "<|call|>"), (r"<\|start\|>",),
    between=r"<\|start\|>assistant")
MUSE = Family((r"<\|start\|>assistant",), ("<|eot|>",), (r"<\|start\|>",), between=r"<\|start\|>assistant")
SMOLVLM = Family((r"Assistant:",), ("<end_of_utterance>",), (r"(?:User|System|Assistant):",),
    specials=("<end_of_utterance>",))
RWKV = Family((r"Assistant:",), (), (r"(?:User|System|Assistant):",))
# fmt: on

DEEPSEEK_BOS, DEEPSEEK_EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
LLAMA3_MODEL = Model(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"))
QWEN = Model(CHATML, None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>"))
GLM_MODEL = Model(GLM, None, "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>"))
PHI3_MODEL = Model(PHI3, "<s>", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>"))
MISTRAL_MODEL = Model(MISTRAL, "<s>", "</s>")
COHERE_MODEL = Model(COHERE, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
DEEPSEEK_MODEL = Model(DEEPSEEK, DEEPSEEK_BOS, DEEPSEEK_EOS)
LAGUNA_MODEL = Model(LAGUNA, "〈|EOS|〉", "〈|EOS|〉", ("〈|EOS|〉", "</assistant>"))
GEMMA4_MODEL = Model(GEMMA4, "<bos>", "<eos>", ("<eos>", "<turn|>", "<|tool_response>"))

MODELS: tuple[tuple[str, Model], ...] = (  # the first expression that is found in the name
    (r"GigaChat-20B", Model(GIGACHAT, "<s>", "</s>", ("</s>", "<|message_sep|>"),
                            extra=("<|role_sep|>", "<|message_sep|>", "<|arg_start|>", "<|arg_end|>"))),
    (r"GigaChat3", Model(GIGACHAT, "<s>", "</s>")),  # its turns end with <|message_sep|>: none of its stop tokens
    (r"OpenHermes-2.5-Mistral|Bielik|MiniCPM5", Model(CHATML, "<s>", "<|im_end|>")),
    (r"vigogne|FusionNet", Model(LLAMA2, "<s>", "</s>", plain=True)),
    (r"Mistral-7B|llava_next", Model(LLAMA2, "<s>", "</s>", plain=True)),
    (r"ChatGLM3", Model(GLM, None, "</s>", ("</s>", "<|user|>", "<|observation|>"))),
    (r"ChatGLM4|GLMEdge|GLM-4|glm4", GLM_MODEL),
    (r"firefunction|functionary", replace(LLAMA3_MODEL, stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"))),
    (r"Hermes-2-Pro", Model(CHATML, "<|begin_of_text|>", "<|im_end|>")),
    (r"MiniCPM-3B", Model(MINICPM, "<s>", "</s>")),
    (r"LFM2|lfm2", Model(CHATML, "<|startoftext|>", "<|im_end|>")),
    (r"StepFun", Model(CHATML, DEEPSEEK_BOS, "<|im_end|>")),
    (r"Nemotron-Nano-v2", Model(NEMOTRON2, "<s>", "<SPECIAL_12>")),
    (r"Qwen-32B", DEEPSEEK_MODEL),  # DeepSeek-R1-Distill-Qwen-32B, before the Qwen
    (r"Qwen|qwen|QwQ|MiMo|SmolLM3|nemotron_3", QWEN),
    (r"granite", Model(GRANITE, "<|end_of_text|>", "<|end_of_text|>")),
    (r"Ling-lite", Model(LING, "<|startoftext|>", "<|endoftext|>")),
    (r"ling-3", Model(LING, "<|startoftext|>", "<|endoftext|>", ("<|endoftext|>", "<|role_end|>"))),
    (r"Megrez", Model(MEGREZ, None, "<|turn_end|>")),
    (r"AlphaMonarch", Model(MONARCH, "<s>", "</s>")),
    (r"Orion", Model(ORION, "<s>", "</s>")),
    (r"gemma4|gemma-4|diffusion_gemma", GEMMA4_MODEL),
    (r"gemma", Model(GEMMA, "<bos>", "<eos>", ("<eos>", "<end_of_turn>"))),
    (r"Phi-3|phi3", PHI3_MODEL),
    (r"phi-4", Model(PHI4, None, "<|im_end|>")),
    (r"yandex", Model(YANDEX, "<s>", "</s>")),
    (r"Apertus", Model(APERTUS, "<s>", "<|assistant_end|>", ("<|assistant_end|>", "<|tools_suffix|>"))),
    (r"Apriel-1.6", Model(APRIEL, "<s>", "<|end|>")),
    (r"Apriel-1.5", Model(APRIEL, "<s>", "</s>", ("</s>", "<|end|>"))),
    (r"Seed-OSS", Model(SEED, "<seed:bos>", "<seed:eos>")),
    (r"cohere|Cohere", COHERE_MODEL),
    (r"deepseek-coder", Model(CODER, DEEPSEEK_BOS, "<|EOT|>")),
    (r"DeepSeek-V2", Model(DEEPSEEK2, DEEPSEEK_BOS, DEEPSEEK_EOS)),
    (r"Spark", Model(SPARK, None, DEEPSEEK_EOS)),
    (r"DeepSeek|deepseek", DEEPSEEK_MODEL),
    (r"Kimi-K3", Model(KIMI3, None, "<|end_of_msg|>")),
    (r"Kimi", Model(KIMI, "[BOS]", "<|im_end|>")),
    (r"MiniMax-M1", Model(MINIMAX1, None, "<end_of_sentence>")),
    (r"MiniMax", Model(MINIMAX, "]~!b[", "[e~[")),
    (r"Mistral|Ministral|Devstral", MISTRAL_MODEL),
    (r"Laguna", LAGUNA_MODEL),
    (r"Reka", Model(REKA, None, "<|endoftext|>", ("<|endoftext|>", "<sep>"))),
    (r"Hy3", Model(HUNYUAN, "<｜hy_begin_of_sentence:opensource｜>", "<｜hy_eos:opensource｜>")),
    (r"Solar", Model(SOLAR, None, "<|end|>", ("<|end|>", "<|calls|>", "<|endoftext|>"))),
    (r"gptoss", Model(HARMONY, "<|startoftext|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>"))),
    (r"muse_glimmer", Model(MUSE, None, "<|eot|>")),
    (r"smolvlm|idefics3", Model(SMOLVLM, None, "<end_of_utterance>")),
    (r"rwkv", Model(RWKV, None, "<|endoftext|>")),
    (r"Llama-3|llama3", LLAMA3_MODEL),
)  # fmt: skip

CONTROL = re.compile(r"<\|[^<>|\s{}'\"]+\|>|<｜[^<>\s{}'\"]+｜>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # not special


def model_of(name: str) -> Model:
    """The model that a template belongs to; KeyError if the table does not know it."""
    for expression, model in MODELS:
        if re.search(expression, name):
            return model
    raise KeyError(name)


def special_tokens(model: Model, template: str) -> list[str]:
    """Every control string that is one token in this model."""
    named = [token for token in (model.bos, model.eos, *model.stops, *model.extra, *model.family.closes) if token]
    words = [] if model.plain else [*model.family.specials, *CONTROL.findall(template)]
    return list(dict.fromkeys([*named, *words]))
