"""Chat templates as models have them, in short, over a vocabulary of bytes."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from protocol.items import CallOutput
from sampler.chat_template import ChatFormat, ChatMLFormat, TemplateFormat
from sampler.recorded_turn import Call
from sampler.tokenizer import Tokenizer
from tests.sampler.smollm2 import smollm2_directory, smollm2_tokenizer
from tests.tiny_model import END_OF_TEXT, IM_END, byte_tokenizer

BYTE_LEVEL = Tokenizer(byte_tokenizer(), [END_OF_TEXT, IM_END])

# transformers drops a line break that follows a block.
BREAK = "{{ '\\n' }}"
SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Be good.{% endif %}"
)
GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = (
    '<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
ASSISTANT = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content or not loop.first %}" + BREAK + "{% endif %}" + CALL + "{% endfor %}"
)

# Qwen 2.5: tools in the system turn, tool messages that follow each other in one user turn.
QWEN = (
    "<|im_start|>system\n" + SYSTEM + "{% if tools %}" + BREAK + "\n# Tools\n<tools>"
    "{% for tool in tools %}" + BREAK + "{{ tool | tojson }}{% endfor %}" + BREAK + "</tools>\n"
    "Answer with <tool_call></tool_call>.{% endif %}<|im_end|>\n"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n" + ASSISTANT + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    + BREAK + "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}" + GENERATE
)  # fmt: skip


def each(turn: str, end: str = "<|im_end|>\n", generate: str = GENERATE, head: str = "") -> str:
    """Return a template that writes every message as a turn of its own."""
    return (
        head
        + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + turn
        + end
        + "{% endfor %}"
        + generate
    )


TRIMS = each(ASSISTANT.replace("m.content }}", "m.content | trim }}"))
LINE_BREAKS_BETWEEN = each(
    ASSISTANT,
    end="<|im_end|>{% if not loop.last %}" + BREAK + "{% endif %}",
    generate="{% if add_generation_prompt %}" + BREAK + "<|im_start|>assistant\n{% endif %}",
)
# Qwen 3: an empty block of thoughts in the last turn, if it is the model's, and in a prompt that
# wants no thoughts; older thoughts are dropped.
THINKS = each(
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    + ASSISTANT.replace("m.content }}", "m.content.split('</think>')[-1] }}"),
    generate="{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
# DeepSeek R1, QwQ: a prompt that opens a block of thoughts.
OPENS_THINKING = each(
    ASSISTANT,
    generate="{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
)
DATED = each(ASSISTANT, head="<|im_start|>system\nToday is {{ today }}.<|im_end|>\n")
STRICT = each(
    "{% if m.role == 'tool' and not (messages[loop.index0 - 1].tool_calls"
    " or messages[loop.index0 - 1].role == 'tool') %}"
    "{{ raise_exception('a tool message must follow a tool call') }}{% endif %}"
    "{% if m.role == 'tool' %}{{ m.name }} {{ m.tool_call_id }}: {% endif %}" + ASSISTANT
)
# Qwen 3.5: one system message, at the beginning.
ONE_SYSTEM = each(
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must be at the beginning') }}{% endif %}" + ASSISTANT
)
TOOLLESS = each(
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}{{ m.content }}"
)
# Gemma: user and assistant in turns, and nobody else.
ALTERNATES = each(
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ m.content }}"
)
# Says nothing of a system message but of the first.
FORGETS_SYSTEMS = each("{{ m.content }}").replace(
    "{% for m in messages %}",
    "{% for m in messages if m.role != 'system' or m == messages[0] %}",
)
# Puts all system messages first.
HOISTS_SYSTEMS = each("{{ m.content }}").replace(
    "{% for m in messages %}",
    "{% for m in messages | selectattr('role', 'equalto', 'system') | list"
    " + messages | rejectattr('role', 'equalto', 'system') | list %}",
)
WITH_TOOLS = {
    "Qwen": QWEN,
    "one that trims": TRIMS,
    "line breaks between turns": LINE_BREAKS_BETWEEN,
    "thoughts in the last turn": THINKS,
    "one that opens thoughts": OPENS_THINKING,
    "one with a date": DATED,
    "one that wants a call before an output": STRICT,
}
WITHOUT_TOOLS = {
    "no tools": TOOLLESS,
    "roles that alternate": ALTERNATES,
    "system messages forgotten": FORGETS_SYSTEMS,
    "system messages first": HOISTS_SYSTEMS,
}


class Template:
    """A template as transformers applies it, and as the sampler does."""

    def __init__(self, tokenizer: Tokenizer, hf: PreTrainedTokenizerFast, template: str) -> None:
        self.tokenizer = tokenizer
        self.today = "Monday"
        self._hf = hf
        self._template = template

    def format(self, *, knows_tools: bool = True) -> TemplateFormat:
        return TemplateFormat(self.tokenizer, self.render, knows_tools=knows_tools)

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
    ) -> str:
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        return str(self._apply(messages, tools, add_generation_prompt, tokenize=False, **switches))

    def ids(self, messages: Any, tools: Any = None, *, generate: bool, **how: Any) -> list[int]:
        """Return what transformers gives."""
        return list(self._apply(messages, tools, generate, tokenize=True, return_dict=False, **how))

    def _apply(self, messages: Any, tools: Any, generate: bool, **how: Any) -> Any:
        return self._hf.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            add_generation_prompt=generate,
            today=self.today,
            **how,
        )


def with_templates(fast: FastTokenizer) -> PreTrainedTokenizerFast:
    """Return ``fast`` as transformers wraps it."""
    return PreTrainedTokenizerFast(tokenizer_object=fast)  # type: ignore[no-untyped-call]


BYTES_HF = with_templates(byte_tokenizer())


def over_bytes(template: str) -> Template:
    return Template(BYTE_LEVEL, BYTES_HF, template)


@cache
def _smollm2_hf() -> PreTrainedTokenizerFast:
    return with_templates(FastTokenizer.from_file(str(smollm2_directory() / "tokenizer.json")))


def over_smollm2(template: str) -> Template:
    return Template(smollm2_tokenizer(), _smollm2_hf(), template)


NewTemplate: TypeAlias = Callable[[str], Template]


def formats(new_template: NewTemplate = over_bytes) -> dict[str, ChatFormat]:
    """Return a format of every kind."""
    return {
        "ChatML": ChatMLFormat(new_template(QWEN).tokenizer, "Be good."),
        **{name: new_template(template).format() for name, template in WITH_TOOLS.items()},
        "one system message": new_template(ONE_SYSTEM).format(),
        **{
            name: new_template(template).format(knows_tools=False)
            for name, template in WITHOUT_TOOLS.items()
        },
    }


def read(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ``ids``, control tokens by their names in brackets of their own."""
    names = {token_id: f"⟦{name}⟧" for name, token_id in tokenizer.added_tokens.items()}
    parts = [names.get(i, "").encode() or tokenizer.token_bytes(i) for i in ids]
    return b"".join(parts).decode()


def answers(calls: Sequence[Call], outputs: Sequence[str]) -> list[CallOutput]:
    return [CallOutput(c.call_id, o) for c, o in zip(calls, outputs, strict=False)]
