"""Chat templates that take too much, to compile or to render, and that the bounds change nothing for the others."""

from __future__ import annotations

import tracemalloc

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.frontend.schemas.chat import ChatBody, ChatMessage, ChatTool, FunctionDefinition
from penstock.frontend.text.bounded_operations import BoundedContext
from penstock.frontend.text.bounded_sandbox import MAX_SOURCE_CHARACTERS, BoundedEnvironment
from penstock.frontend.text.chat_template import ChatTemplate, TemplateRefusedError
from penstock.frontend.text.render_budget import INLINE, OverBudget, RenderBudget, RenderLimits

MAX_MEMORY_BYTES = 64 << 20
IN_LOOP = "{{% set ns = namespace(v={first}) %}}{{% for i in range(60) %}}{{% set ns.v = {next} %}}{{% endfor %}}"
ATTACKS = {
    # of the review
    "constant power": "{{ 9 ** (9 ** 9) }}{{ messages[0].content }}",
    "power": "{% set one = 1 %}{{ (9 * one) ** (9 ** 9) }}",
    "long text": "{{ 'x' * 8000000000 }}",
    "doubled text": IN_LOOP.format(first="'x'", next="ns.v + ns.v") + "{{ ns.v }}",
    "center": "{{ 'a'|center(3 * 10 ** 9) }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    # work that no operation shows
    "output": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "captured output": "{% set x %}{% for a in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}{% endset %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "lists": "{% for a in range(99999) %}{% set x = [" + "a," * 999 + "] %}{% endfor %}",
    # values that are large as trees
    "tree": IN_LOOP.format(first="[1]", next="[ns.v, ns.v]") + "{{ ns.v }}",
    "hashed tree": IN_LOOP.format(first="(1, 2)", next="(ns.v, ns.v)") + "{% set d = {ns.v: 1} %}",
    "arguments": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f(1) }}",
    "numbers": IN_LOOP.format(first="9", next="ns.v * ns.v"),
    "hexadecimal": "{{ ('f' * 9999)|int(base=16) }}",
    "unpacked": "{{ dict(*('中' * 99999)) }}",
    # operations whose results are larger than their operands
    "joined text": IN_LOOP.format(first="'x'", next="ns.v ~ ns.v"),
    "lists added": IN_LOOP.format(first="[1]", next="ns.v + ns.v"),
    "list times": "{{ ([1, 2, 3] * 3000000000)|length }}",
    "slices": "{% set x = 'x' * 80000 %}" + "".join(f"{{% set a{n} = x[1:] %}}" for n in range(20)),
    "characters": "{{ ('中' * 400000)|list|length }}",
    "words": "{{ ('a ' * 40000).split()|length }}",
    "lines": "{{ ('a\n' * 40000).splitlines()|length }}",
    "replace": "{{ ('a' * 10000)|replace('a', 'b' * 10000) }}",
    "replace as a method": "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "join": "{{ range(9999)|join('x' * 9999) }}",
    "join as a method": "{{ ('x' * 9999).join(range(9999)|map('string')) }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "percent with a star": "{{ '%*d'|format(3000000000, 1) }}",
    "percents": "{{ '%s' * 20 % ([('x' * 99999)] * 20) }}",
    "format": "{{ '{:3000000000}'.format(1) }}",
    "format in a format": "{{ '{:{w}}'.format(1, w=3000000000) }}",
    "formats": "{{ ('{0}' * 10000).format('x' * 10000) }}",
    "indent": "{{ 'a\nb'|indent(3000000000) }}",
    "many indents": "{{ ('a\n' * 10000)|indent(9999) }}",
    "batch": "{{ [1]|batch(3000000000, 'x')|list }}",
    "slice": "{{ [1]|slice(3000000000)|list }}",
    "tojson": "{{ messages|tojson(indent=3000000000) }}",
    "separators": "{{ messages|tojson(separators=('x' * 99, ':')) }}",
    "round": "{{ 5|round(-3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(9999) }}",
    "bytes": "{{ (5).to_bytes(3000000000, 'big') }}",
    "translate": "{{ 'a'.translate({97: 'b' * 9}) }}",
    "sum of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    # changes of lists
    "endless append": "{% set l = [1] %}{% for x in l %}{% set _ = l.append(x) %}{% endfor %}",
    "shared list": "{% set l = [] %}{% set m = [l] * 999 %}{{ m }}{% for n in range(999) %}{% set _ = l.append(n) %}"
    "{% endfor %}{{ m }}",
    "list in itself": "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}",
    "lists that grow in others": "{% set a = [1] %}{% set b = [1] %}{% set A = [[a] * 90] * 90 %}"
    "{% set B = [[b] * 90] * 90 %}{% for i in range(99) %}{% set _ = a.append('x' * i) %}"
    "{% set _ = b.append('x' * i) %}{% endfor %}{{ A == B }}",
    "list that grows in arguments": "{% macro m() %}{{ a.append(1) }}{{ varargs }}{% endmacro %}{% set a = [] %}"
    "{{ m(a, a) }}",
    "list that grows in a batch": "{% set a = [] %}{% for b in [none]|batch(999, a) %}{{ a.append(1) }}{% endfor %}",
    "list that grows in a batch of a map": "{% set a = [] %}"
    "{% for b in ([none] * 99)|map('default', a, true)|batch(99) %}{{ a.append(1) }}{% endfor %}",
    "one text many times": "{% set l = [] %}{% set t = 'x' * 9999 %}{% for i in range(99) %}{% set _ = l.append(t) %}"
    "{% endfor %}{{ l == [] }}",
    "list of the request": "{% set _ = messages.append('x') %}",
    "list in the request": "{% set _ = tools[0].function.parameters.required.pop() %}",
    "date": "{{ strftime_now('%Y' * 1000) }}",
    "escape at compilation": "{% autoescape 'a'|center(3000000000) %}x{% endautoescape %}",
}
ORDINARY = """\
{{ "a" + "b" + c }}{{ [1] + [2, [c]] }}{{ 1 + 2 + 0.5 }}{{ "a" ~ 1 ~ none ~ [c] }}{{ c * 3 }}{{ [c] * 2 }}{{ 7 % 4 }}
{{ "%s-%d" % (c, 3) }}{{ "%5.1f"|format(2.25) }}{{ "{} {x:>4}".format(c, x=1) }}{{ 2 ** 10 }}{{ 7 // 2 }}
{{ -(c|length) }}
{{ xs|join(", ") }}{{ xs|map("upper")|join }}{{ maps|join("/", attribute="k") }}{{ ", ".join(xs) }}
{{ c|replace("x", "yy") }}
{{ "a\\nb\\n\\nc"|indent }}{{ "a\\nb"|indent(2, true, true) }}{{ "a\\nb"|indent("> ") }}{{ xs|batch(2, "-")|list }}
{{ xs|slice(2)|list }}{{ [3, 1, 2]|sort }}{{ xs|reverse|list }}{{ "abc"|reverse }}{{ [1, 2]|sum }}{{ maps|sum("n", 1) }}
{{ maps|groupby("k") }}{{ {"b": 1, "a": c}|dictsort }}{{ maps|selectattr("n", "gt", 1)|list }}{{ xs|unique|list }}
{{ xs[1:] }}{{ c[::-1] }}{{ xs[-1] }}{{ {"a": [c, {"b": (1, c)}]} }}{{ c|trim|title|upper|lower|capitalize|center(9) }}
{{ c.split("x") }}{{ " a b ".split() }}{{ c.strip("x") }}{{ c.startswith("x") }}{{ c.find("y") }}
{{ "a b c"|truncate(3) }}
{{ 2.5|round }}{{ -3|abs }}{{ "3"|int + 1 }}{{ "<a>"|e }}{{ c|string|length }}{{ xs|first }}{{ xs|last }}{{ nothing }}
{{ range(3)|list }}{{ dict(a=1, b=c) }}{{ dict(*[{'k': 1}]) }}
{{ maps[0].items()|list }}{{ maps[0].get("z", c) }}{{ c in xs }}{{ [c] == [c] }}
{% macro m(a, b="d") %}[{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() if caller }}]{% endmacro %}
{{ m(1) }}{{ m(1, 2, 3, z=4) }}{% call m(c) %}inner{% endcall %}{% filter upper %}x{{ c }}{% endfilter %}
{% set s %}{{ c }}!{% endset %}{{ s }}{% set a, b = xs[0], c %}{{ a }}{{ b }}{% with q = c + "w" %}{{ q }}{% endwith %}
{% set ns = namespace(n=0, l=[]) %}{% for x in xs if x != "p" %}{% set ns.n = ns.n + loop.index %}{{ loop.last }}
{% else %}-
{% endfor %}{{ ns.n }}{% for x in [] %}{% else %}none{% endfor %}{% for x in xs %}{% if x == "q" %}{% continue %}
{% elif x == "r" %}{% break %}{% else %}{{ x }}{% endif %}{% endfor %}{{ "q" if c else "r" }}
{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}{{ loop is defined }}
{% block inner scoped %}{{ c }}{% endblock %}{{ self.inner() }}{% set cy = cycler("o", "e") %}
{{ cy.next() }}{{ cy.next() }}
"""
VARIABLES = {"c": "xyx", "xs": ["p", "q", "r"], "maps": [{"k": "u", "n": 1}, {"k": "v", "n": 2}]}


def rendered(source: str, limits: RenderLimits) -> str:
    tools = [ChatTool(FunctionDefinition("f", parameters={"type": "object", "required": ["a"]}))]
    return ChatTemplate(source, {}).render(ChatBody(messages=[ChatMessage("user", "Hello")], tools=tools), limits)


@pytest.mark.parametrize("source", ATTACKS.values(), ids=ATTACKS)
def test_template_that_takes_too_much_is_refused_with_its_line_and_limit(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRefusedError, match=r"^line [1-5]: .*(limit|longer than|not for templates|only)"):
            rendered("\n" + source, INLINE)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()


def test_template_changes_its_own_lists_by_texts_and_numbers() -> None:
    source = (
        "{% set l = [] %}{% for x in 'abc' %}{% set _ = l.append(x) %}{{ l }}{% endfor %}{{ l.pop(0) }}{{ l.pop() }}"
    )
    assert rendered(source, INLINE) == "['a']['a', 'b']['a', 'b', 'c']ac"
    source = "{% set ns = namespace(l=[]) %}{% for x in 'ab' %}{% set _ = ns.l.append(x) %}{% endfor %}{{ ns.l }}"
    assert rendered(source, INLINE) == "['a', 'b']"


def test_writing_a_list_is_counted_before_it_is_written_also_if_only_appended_texts_make_it_large() -> None:
    source = "{% set l = [] %}{% set t = 'x' * 9999 %}{% for i in range(60) %}{% set _ = l.append(t) %}{% endfor %}"
    assert rendered(source, INLINE) == ""
    with pytest.raises(TemplateRefusedError, match="50000 units"):
        rendered(source + "{{ l|tojson|length }}", INLINE)


def test_filler_text_without_a_bound_does_not_exist() -> None:
    with pytest.raises(TemplateRefusedError, match=r"^line 1: .*UndefinedError"):
        rendered("{{ lipsum(n=100000) }}", INLINE)


def test_time_has_a_limit_where_counted_work_is_quick() -> None:
    with pytest.raises(TemplateRefusedError, match=r"more than the limit of -1\.0 s"):
        rendered("{% for a in range(99) %}{% endfor %}", RenderLimits(work=10**9, cpu_s=-1.0))


def test_large_input_may_take_more() -> None:
    source = "{% for message in messages %}{{ message.role + ': ' + message.content|trim }}\n{% endfor %}"
    body = ChatBody(messages=[ChatMessage("user", "Hello")] * 500)
    template = ChatTemplate(source, {})
    assert len(template.render(body, RenderLimits(work=500, cpu_s=9.0, grows=True))) == 500 * len("user: Hello\n")
    with pytest.raises(TemplateRefusedError, match="the limit of 500 units"):
        template.render(body, RenderLimits(work=500, cpu_s=9.0))


def test_bounds_change_nothing_that_is_small() -> None:
    extensions = [jinja2.ext.loopcontrols]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    template = BoundedEnvironment().bounded_template(ORDINARY)
    context = template.new_context(VARIABLES)
    assert isinstance(context, BoundedContext)
    context.budget = RenderBudget(INLINE, VARIABLES)
    bounded = "".join(template.root_render_func(context))
    assert bounded.splitlines() == plain.from_string(ORDINARY).render(VARIABLES).splitlines()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x" * (MAX_SOURCE_CHARACTERS + 1), "131073 characters; the limit is 131072"),
        ("{{" + "a," * 20_000 + "}}", "nodes; the limit is 10000"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "nested too deeply"),
        ("{{ a|urlize }}", "line 1: No filter named 'urlize'"),
    ],
)
def test_template_that_is_too_large_to_compile_is_refused(source: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        ChatTemplate(source, {})


def test_model_is_refused_if_its_template_cannot_render_a_short_chat() -> None:
    with pytest.raises(ValueError, match="cannot render a chat of one message: line 1: a power has more than"):
        ChatTemplate(ATTACKS["constant power"], {}).check()
    ChatTemplate("{{ raise_exception('needs a system message') }}", {}).check()


def test_measuring_a_value_takes_part_in_the_budget() -> None:
    with pytest.raises(OverBudget):
        RenderBudget(INLINE, None).size([0] * (INLINE.work + 1))
