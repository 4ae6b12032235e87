"""Chat templates, as transformers renders them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagetrie.errors import InvalidRequestError, ModelLoadError
from pagetrie.models.loading import load_checkpoint
from pagetrie.text.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The forms that real templates use: macros, namespaces, loop controls, filters, whitespace control, tools.
RICH = """
{%- macro say(role, text) -%}
[{{ role | upper }}] {{ text | trim }}
{% endmacro -%}
{% set ns = namespace(system='') %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% set ns.system = m.content %}
        {% continue %}
    {% endif %}
    {% if m.role not in ('user', 'assistant') %}
        {{ raise_exception('unknown role ' ~ m.role) }}
    {% endif %}
    {% if m.role == 'assistant' %}
        {% generation %}
    {{- say(m.role, m.content) }}
        {% endgeneration %}
    {% else %}
    {{- say(m.role, m.content) }}
    {% endif %}
{% endfor %}
{% if tools %}
tools: {{ tools | tojson(indent=2) }} {{ tools[0].function.name | tojson }}
{% endif %}
{{ bos_token }}|{{ eos_token }}|{{ ns.system }}|{{ extra is defined }}|{{ documents is none }}
"""
MESSAGES = [
    {"role": "system", "content": 'Be <kind> & "brief".'},
    {"role": "user", "content": "  Grüße 🙂  "},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "größe", "parameters": {"b": 1, "a": ["<x>", None, True]}}}
]


@pytest.mark.parametrize("source", [CHATML, RICH])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generate", [True, False])
def test_the_text_is_that_of_transformers(source: str, tools: Any, generate: bool) -> None:
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    for extra in ({}, {"extra": 1}):
        theirs, _ = render_jinja_template(
            [MESSAGES], tools=tools, chat_template=source, add_generation_prompt=generate, **variables, **extra
        )
        assert ours.render(MESSAGES, tools, add_generation_prompt=generate, **extra) == theirs[0]


def test_bundled_model(bundled_model: Path, tmp_path: Path) -> None:
    tokenizer = load_checkpoint(bundled_model, tmp_path).tokenizer()
    template = ChatTemplate.of(tokenizer)
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert ChatTemplate.of(tokenizer, "{{ bos_token }}").render([]) == "<|im_start|>"


def test_the_date_is_given_from_outside() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2031, 2, 3))
    assert template.render([]) == "03 Feb 2031"


def test_text_parts_are_joined_for_templates_that_want_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = ChatTemplate(CHATML).render([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert text == "<|im_start|>user\none\ntwo<|im_end|>\n"


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in m.content %}<{{ p.text }}>{% endfor %}",
        "{% for p in m['content'] | list %}<{{ p['text'] }}>{% endfor %}",
        "{% set content = m.content %}{% for p in content %}<{{ p.text }}>{% endfor %}",
        "{% set c = m.content %}{% set d = c %}{% for p in d %}<{{ p.text }}>{% endfor %}",
    ],
)
def test_text_parts_reach_templates_that_take_them(loop: str) -> None:
    source = "{% for m in messages %}" + loop + "{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(source).render([{"role": "user", "content": parts}]) == "<one><two>"


@pytest.mark.parametrize("content", ["The answer is", " spaced  ", [{"type": "text", "text": "The answer is"}]])
def test_continuing_the_final_message(content: Any) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]
    text = ChatTemplate(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    written = content if isinstance(content, str) else content[0]["text"]
    assert text == f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{written}"
    assert messages[1]["content"] == content


def test_continuing_is_refused_where_it_cannot_work() -> None:
    def refusal(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
        with pytest.raises(InvalidRequestError) as caught:
            ChatTemplate(source).render(messages, continue_final_message=True, **options)
        assert caught.value.param == "messages"
        return caught.value.message

    assistant = [{"role": "assistant", "content": "x"}]
    assert "exclude each other" in refusal(CHATML, assistant, add_generation_prompt=True)
    no = {"add_generation_prompt": False}
    assert "needs a final message with text" in refusal(CHATML, [], **no)
    assert "needs a final message with text" in refusal(CHATML, [{"role": "assistant", "content": None}], **no)
    assert "leaves out the final message's content" in refusal("nothing", assistant, **no)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (None, MESSAGES, "this model has no chat template"),
        (RICH, [{"role": "tool", "content": ""}], "can't render these messages: unknown role tool"),
        ("{{ messages[9].content.x }}", MESSAGES, "can't render these messages: "),
        ("{{ 1 / 0 }}", MESSAGES, "can't render these messages: division by zero"),
        ("{{ messages.append(1) }}", MESSAGES, "can't render these messages: "),  # the sandbox is immutable
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", MESSAGES, "can't render these messages: "),
        ("{% for i in range(99999999) %}{% endfor %}", MESSAGES, "can't render these messages: "),
        (CHATML, ["hello"], "each message must be an object with a role"),
        (CHATML, [{"content": "x"}], "each message must be an object with a role"),
        (CHATML, [{"role": "user", "content": 5}], "content must be a string or a list of parts"),
        (CHATML, [{"role": "user", "content": ["x"]}], "content must be a string or a list of parts"),
        (
            CHATML,
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "content parts of type 'image_url' aren't supported",
        ),
    ],
)
def test_refusals(source: str | None, messages: Any, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(source).render(messages)
    assert expected in caught.value.message
    assert caught.value.param == "messages"


def test_whether_there_is_a_template() -> None:
    assert ChatTemplate(CHATML)
    assert not ChatTemplate(None)


def test_a_template_with_a_syntax_error() -> None:
    with pytest.raises(ModelLoadError, match="the chat template has a syntax error in line 2: ") as caught:
        ChatTemplate("fine\n{% for %}")
    assert "\n" not in str(caught.value)
