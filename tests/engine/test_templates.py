"""Chat templates are programs from a model's file: good ones as llama-cpp-python renders them, bad ones stopped."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
import tiny
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from eagle3_cli import confined
from eagle3_cli.engine import load_engine
from eagle3_cli.errors import OptionError, PromptError
from eagle3_cli.llama import Model, render_chat
from eagle3_cli.settings import PairSettings, RuntimeSettings
from eagle3_cli.templates import OWN, TIMES, render

MESSAGES = [
    {"role": "system", "content": "Be brief. Ünïcode <&> \"'\n"},
    {"role": "user", "content": "Why?\x1b"},
    {"role": "assistant", "content": " Because.\n"},
    {"role": "user", "content": "  And now?  "},
]


@pytest.fixture(scope="module")
def model(tiny_target):
    model = Model(tiny_target.path, [], 0)
    yield model
    model.close()


def rendered(template, messages=MESSAGES):
    return render("model.gguf", template, {"messages": messages, "bos_token": "<s>", "add_generation_prompt": True})


def works():
    return rendered(tiny.CHATML, [{"role": "user", "content": "Hi"}]).startswith("<|im_start|>user\nHi")


LOOP = "{% for m in messages %}"
GOOD = {
    "chatml": tiny.CHATML,
    "tokens": "{{ bos_token }}" + LOOP + "{{ m.role }}{{ m.content }}{{ eos_token }}{% endfor %}",
    "continue": LOOP + "{% if loop.index == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}",
    "break": LOOP + "{% if loop.last %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
    "json in ASCII": "{{ 'é<' | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "blocks": LOOP + "\n    {% if m.role == 'user' %}\n  {{- m.content | trim }}\n    {% endif %}\n{% endfor %}\n",
    "macros": "{% macro say(m) %}[{{ m.content.split('.')[0] }}]{% endmacro %}" + LOOP + "{{ say(m) }}{% endfor %}",
    "namespace": "{% set n = namespace(k=0) %}" + LOOP + "{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "generation": LOOP + "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}.{% if documents is not defined %}yes{% endif %}",
    "none": "{% if tools is none and functions is none %}yes{% endif %}",
    "date": "{{ strftime_now('%Y') | length }}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role') | list }}",
    "globals": "{{ range(3) | list }}{{ dict(a=1) }}{{ '%s-%s' % (1, 'a') }}{{ 'ab' * 2 ~ 2 ** 8 }}",
    "slices": "{{ messages[::-1][0].role }}{{ messages[1:] | length }}",
    "prompt": "{% if add_generation_prompt %}now{% endif %}{% if not raise_exception %}never{% endif %}",
}


def test_further_variables_reach_the_template_but_not_the_conversations_own(model, monkeypatch):
    monkeypatch.setattr(Model, "chat_template", "{{ messages|length }} {{ think }} {{ tools[0].name }}")
    assert render_chat(model, MESSAGES, {"think": False, "tools": [{"name": "f"}], "messages": []}) == (
        f"{len(MESSAGES)} False f"
    )


def test_a_variable_that_the_template_does_not_use_is_refused(tiny_target):
    settings = [
        PairSettings(tiny_target.path, None, "--no-draft", chat_template_kwargs=json.dumps({name: "x"}))
        for name in ("m", "enable_thinking")
    ]
    with load_engine(settings[0], RuntimeSettings(ctx_size=64, threads=1)) as engine:
        assert engine.settings["chat_template_kwargs"] == {"m": "x"}
    with pytest.raises(OptionError, match=r"the chat template of .* does not use enable_thinking"):
        load_engine(settings[1], RuntimeSettings(ctx_size=64, threads=1))


@pytest.mark.parametrize("name", GOOD)
def test_good_templates_are_rendered_as_by_llama_cpp_python(model, monkeypatch, name):
    monkeypatch.setattr(Model, "chat_template", GOOD[name])
    formatter = Jinja2ChatFormatter(GOOD[name], eos_token="<|im_end|>", bos_token="<|endoftext|>")
    expected = formatter(messages=MESSAGES).prompt
    assert render_chat(model, MESSAGES) == expected
    assert expected


REFUSED = {
    "{{ raise_exception('roles must alternate') }}": "refuses this conversation: roles must alternate",
    "{% for %}": "refuses this conversation",
    "{{ messages[0] ": "refuses this conversation",
    "{{ messages.append(1) }}": "refuses .* unsafe",
    "{{ ''.__class__.__mro__ }}": "refuses .* unsafe",
    "{{ (''|attr('__class__')).x }}": "refuses .* unsafe",
    "{{ self.__init__.__globals__ }}": "refuses .* unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "refuses .* unsafe",
    "{% include '/etc/passwd' %}": "refuses",
    "{{ range(10 ** 9) | list }}": "refuses .* too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "refuses .* recursion",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}": "chat template",
    "{{ 1 // 0 }}": "refuses .* zero",
    "{{ raise_exception('x' * 10 ** 6) }}": "refuses this conversation: x{400}[.]$",
    "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}": f"writes more than {OWN + TIMES * 6}",
}


@pytest.mark.parametrize("template", REFUSED, ids=lambda t: t[:40])
def test_bad_templates_are_one_error(template):
    with pytest.raises(PromptError, match=REFUSED[template]) as caught:
        rendered(template, [{"role": "user", "content": "Hi"}])
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith("model.gguf: its chat template")
    assert works()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ strftime_now.__globals__ }}",
    ],
)
def test_what_the_sandbox_hides_is_not_there(template):
    assert rendered(template) == ""


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 9) }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ 'x' * 10 ** 12 }}",
    "{{ 'x'.center(10 ** 12) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ 'x' | indent(10 ** 12) }}",
    "{{ [1] | batch(10 ** 12, 'x') | list }}",
    "{{ messages | tojson(indent=10 ** 12) }}",
    "{{ lipsum(n=10 ** 9) }}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_templates_that_take_time_or_memory_are_stopped(monkeypatch, template):
    assert works()  # so that the process is there, with everything imported
    monkeypatch.setattr(confined, "SECONDS", 0.5)
    with pytest.raises(PromptError, match=r"model\.gguf: its chat template was stopped") as caught:
        rendered(template)
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    assert works()


def test_what_was_said_may_be_long():
    said = "x" * 5_000_000
    assert rendered("{{ messages[0].content }}", [{"role": "user", "content": said}]) == said
    twice = TIMES * "{{ messages[0].content }}"
    assert len(rendered(twice, [{"role": "user", "content": said}])) == TIMES * len(said)
    with pytest.raises(PromptError, match="writes more than"):
        rendered(twice + twice, [{"role": "user", "content": said}])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit it")
def test_memory_is_limited_where_time_would_do():
    assert rendered("{{ ('a' * 2 ** 28) | length }}") == str(2**28)
    with pytest.raises(PromptError, match="was stopped"):
        rendered("{{ ('a' * 2 ** 31) | length }}")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
def test_ctrl_c_in_a_template_leaves_nothing_behind():
    def interrupt(_signal, _frame):
        raise KeyboardInterrupt

    assert works()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            rendered(ENDLESS[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert works()


def test_a_child_that_was_killed_is_replaced():
    assert works()
    child = confined._process.child
    child.kill()
    child.wait()
    assert works()
    assert confined._process.child is not child


def test_nothing_is_imported_from_the_current_directory(tmp_path, monkeypatch):
    for name in ("json", "jinja2", "runpy", "faulthandler", "eagle3_cli"):
        (tmp_path / f"{name}.py").write_text("open('trap', 'w')\n")
    monkeypatch.chdir(tmp_path)
    confined._process.end()
    assert works()
    assert not os.path.exists("trap")


def test_another_process_is_never_started_for_the_next_text():
    assert works()
    child = confined._process.child
    assert all(works() for _ in range(50))
    assert confined._process.child is child
