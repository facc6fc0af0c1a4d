"""An untrusted chat template fails its own request only."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from inflight.errors import ConfigError, RequestError
from inflight.text import template
from inflight.text.template import Conversation, Rendering, render, render_each

MESSAGES = [{"role": "user", "content": 'a"<b>ü'}]
CANARY = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
REACHED = ("<class", "<module", "<function", "<built-in", "<bound", "root:", "posix", "site-pack")

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ''|attr(['__cl','ass__']|join) }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ messages | map(attribute='__class__.__mro__') | list }}",
    "{{ messages | groupby('__class__') }}",
    "{{ messages | sort(attribute='__class__.__name__') | map(attribute='__class__') | list }}",
    "{{ messages | sum(attribute='__class__') }}",
    "{{ messages | selectattr('__class__') | list | length * '<class' }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ range.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ strftime_now.__func__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self._TemplateReference__context.eval_ctx.environment.globals }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% for m in messages %}{{ loop._iterator.__class__ }}{% endfor %}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
    "{{ '%s' % ''.__class__ }}",
    "{{ ('{0.__class__}'|string).format(1) }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ [f'{1}'] }}{% set f = '{.__class__}'.format %}{{ f(messages) }}",
    "{{ (messages|map('string')|map('format')|first).__class__ }}",
    "{{ messages.__reduce_ex__(2) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.__setitem__(0, 1) }}",
    "{% do messages.append(1) %}",
    "{% set messages[0].role = 'system' %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% extends '/etc/passwd' %}",
    "{{ lipsum.__globals__.os }}",
    "{{ lipsum() }}",
    "{{ messages[9].content.x }}",
    "{{ (x for x in ()).gi_frame }}",
    "{{ debug() }}{% debug %}",
]

BOMBS = {
    "sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format operator": "{{ '%1000000000d' % 1 }}",
    "format with a width": "{{ '%*d' % (999999999, 1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format of a float": "{{ '%.1000000000f' % 1.5 }}",
    "replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "replace method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace of nothing": "{{ ('a' * 1000000) | replace('', 'b' * 1000) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "indent": "{{ ('a\n' * 500000) | indent(100000) }}",
    "wordwrap": "{{ ('a' * 1000000) | wordwrap(1) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a filter": "{% for i in range(99999) %}{% set x = range(9999)|map('string')|join %}"
    "{% endfor %}",
    "range": "{{ range(10 ** 12) | list | length }}",
    "ranges": "{{ [range(99999)] * 99999 | map('list') | list | length }}",
    "recursion without end": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "recursion by two": "{% macro f(n) %}{% if n %}{{ f(n-1)[:1] }}{{ f(n-1)[:1] }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% set l = [[[[]]]] %}{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "join": "{{ range(100000) | join('a' * 1000000) }}",
    "join method": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(100000000) | list | length }}",
    "tojson": "{{ ([1] * 100000) | tojson(indent=1000000) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of a variable": "{% set n = messages | length + 8 %}{{ (n ** (n ** n)) % 7 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}"
    "{% set n.x = n.x * n.x %}{% endfor %}",
    "text times": "{{ 'a' * 10**10 }}",
    "times text": "{{ 10**10 * 'a' }}",
    "list times": "{{ [1] * 10**9 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "output": "{% for i in range(99) %}{{ 'a' * 100000 }}{% endfor %}",
    "captured output": "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}"
    "{% endset %}",
    "nested lists": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x] %}"
    "{% endfor %}{{ n.x }}",
    "products": "{% for a in range(99999) if false %}{% endfor %}"
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
}

COMPILE_BOMBS = {
    "folded power": "{% if 9 ** 9 ** 9 %}{% endif %}",
    "parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "loops": "{% for a in b %}" * 300 + "{% endfor %}" * 300,
    "sums": "{{ " + "+".join(["a"] * 50_000) + " }}",
    "not": "{{ " + "not " * 50_000 + "1 }}",
    "macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(8_000)),
    "outputs": "{{ a }}" * 30_000,
    "digits": "{{ " + "9" * 200_000 + " }}",
    "spaces": "{{" + " " * 260_000,
}


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    template.warm()


def rss() -> int:
    used: int = psutil.Process().memory_info().rss
    return used


@pytest.fixture
def unharmed() -> Iterator[None]:
    """The request is refused in time, this process stays small, and the next request is served."""
    before = rss()
    started = time.monotonic()
    yield
    assert time.monotonic() - started < 1.0
    assert rss() - before < 20 << 20
    assert render(CANARY, MESSAGES, None, None) == '[user: a"<b>ü]'


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = render(source, MESSAGES, None, None)
    except (RequestError, ConfigError) as error:
        text = str(error)
        assert "chat template" in text
    assert not any(word in text for word in REACHED), text
    assert MESSAGES == [{"role": "user", "content": 'a"<b>ü'}]
    assert render(CANARY, MESSAGES, None, None) == '[user: a"<b>ü]'


@pytest.mark.alone
@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"messages: the model's chat template ") as caught:
        render(BOMBS[name], MESSAGES, None, None)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


@pytest.mark.alone
@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("name", COMPILE_BOMBS)
def test_a_bomb_for_the_compiler_is_refused_or_harmless(name: str) -> None:
    try:
        assert len(render(COMPILE_BOMBS[name], MESSAGES, None, None)) < 1 << 20
    except (RequestError, ConfigError) as error:
        assert "chat template" in str(error)
        assert len(str(error)) < 200


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            BOMBS["loops"],
            r"takes too long; allowed: 0\.5 s of CPU time to compile, 0\.2 s to render",
        ),
        (BOMBS["text times"], "needs too much memory; allowed: 256 MiB"),
        (BOMBS["output"], "produces a text that is too long; allowed: 1048576 characters"),
        (BOMBS["recursion without end"], r"failed on the messages \(RecursionError\)"),
    ],
)
def test_the_limit_is_named(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^messages: the model's chat template {message}$"):
        render(source, MESSAGES, None, None)


def test_what_pads_a_text_is_allowed() -> None:
    text = render("{{ 'x'.ljust(3) }}{{ 'x'|center(3) }}{{ '%3d' % 1 }}|", MESSAGES, None, None)
    assert text == "x   x   1|"


def test_conversations_are_rendered_one_by_one() -> None:
    conversations = [Conversation([{"role": "user", "content": text}]) for text in ("a", "b", "")]
    assert render_each(Rendering(CANARY, conversations)) == ["[user: a]", "[user: b]", "[user: ]"]


def test_a_worker_cannot_open_files() -> None:
    """Whatever leaves Jinja's sandbox."""
    render(CANARY, MESSAGES, None, None)
    # One of several sandboxes has rendered; that of a bomb has no worker at the moment.
    sandboxes = [psutil.Process(pid) for pid in template._sandboxes.pids]
    (worker, *_) = [child for sandbox in sandboxes for child in sandbox.children()]
    assert worker.rlimit(psutil.RLIMIT_NOFILE) == (0, 0)
    assert worker.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert worker.rlimit(psutil.RLIMIT_CORE) == (0, 0)
    with open(f"/proc/{worker.pid}/cmdline") as line:
        assert "jinja_sandbox" in line.read()
    assert len(os.listdir(f"/proc/{worker.pid}/fd")) == 5  # three of them /dev/null


@pytest.mark.alone
def test_a_rendering_does_not_wait_for_a_bomb() -> None:
    bombs = [threading.Thread(target=_refused, args=(BOMBS["loops"],)) for _ in range(3)]
    waits = []
    render(CANARY, MESSAGES, None, None)
    for thread in bombs:
        thread.start()
    while any(thread.is_alive() for thread in bombs):
        started = time.monotonic()
        assert render(CANARY, MESSAGES, None, None) == '[user: a"<b>ü]'
        waits.append(time.monotonic() - started)
    assert sorted(waits)[len(waits) // 2] < 0.05
    assert max(waits) < 1.0  # the first one may start a sandbox


@pytest.mark.alone
def test_a_hung_sandbox_is_replaced() -> None:
    render(CANARY, MESSAGES, None, None)
    for pid in template._sandboxes.pids:
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    assert render(CANARY, MESSAGES, None, None) == '[user: a"<b>ü]'
    assert time.monotonic() - started < 4.5
    template._sandboxes.close()


def test_a_killed_sandbox_is_replaced() -> None:
    render(CANARY, MESSAGES, None, None)
    for pid in template._sandboxes.pids:
        os.killpg(pid, signal.SIGKILL)
    assert render(CANARY, MESSAGES, None, None) == '[user: a"<b>ü]'


def _refused(source: str) -> None:
    with pytest.raises(RequestError):
        render(source, MESSAGES, None, None)
