"""Jinja's immutable sandbox in which no template takes more than its budget, neither to compile nor to render.

Work is counted per block of statements, and per operation that makes a value. What no chat template needs and is hard
to bound does not exist.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from penstock.frontend.text.bounded_operations import (
    ADDED,
    JOINED,
    LIST_CHANGES,
    MADE,
    METERED,
    SLICED,
    SPEND,
    TEXT,
    BoundedContext,
    bounded_filters,
    budget_of,
    check_format,
    check_text_method,
    counted_result,
    is_known_method,
    join,
    units_of,
)
from penstock.frontend.text.render_budget import MAX_BITS, Refused

_Node = TypeVar("_Node", bound=nodes.Node)

MAX_SOURCE_CHARACTERS = 128 << 10
_MAX_NODES = 10_000


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's text for training. Renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Variables(Namespace):
    """Is no container: it may contain itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%"))
    context_class = BoundedContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], cache_size=0
        )
        del self.globals["lipsum"]
        self.globals["namespace"] = _Variables
        self.filters = bounded_filters(self.filters)

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile. Raises ValueError for what cannot be compiled within the limits."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ValueError(f"the chat template has {len(source)} characters; the limit is {MAX_SOURCE_CHARACTERS}")
        try:
            tree = self.parse(source)
            num_nodes = sum(1 for _ in tree.find_all(nodes.Node))
            if num_nodes > _MAX_NODES:
                raise ValueError(f"the chat template has {num_nodes} nodes; the limit is {_MAX_NODES}")
            code = self.compile(_Weaver().visit(tree))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, SyntaxError, AssertionError) as error:
            raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from None
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_change = type(obj) is list and attr in LIST_CHANGES  # `call` decides
        return is_change or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "%":
            if isinstance(left, str):
                check_format(budget, left, "%", right)
        elif operator == "*":
            for many, number in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(number, int):
                    budget.spend(units_of(many) * max(number, 0))
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
            raise Refused(f"a power has more than the limit of {MAX_BITS} bits")
        return counted_result(budget, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        budget = budget_of(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        for value in (*args, *kwargs.values()) if args or kwargs else ():
            budget.check_size(value)
            if __obj is not _Variables:
                budget.hold(value)
        if isinstance(owner, str):
            if method.__name__ == "join":
                (values,) = args
                return join(cast("BoundedContext", __context), values, owner)
            check_text_method(budget, owner, method.__name__, args, kwargs)
        elif type(owner) is list and method.__name__ in LIST_CHANGES:
            budget.change(owner, args)
        elif owner is not None and not is_known_method(owner, method.__name__):
            raise Refused(f"{type(owner).__name__}.{method.__name__} is not for templates")
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Weaver(NodeTransformer):
    """Puts the counting into a template's tree. Use once."""

    def __init__(self) -> None:
        self._units: list[int] = [0]
        """Nodes of the blocks around the current node, the innermost last."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self._units[-1] += 1
        return super().visit(node, *args, **kwargs)

    def generic_visit(self, node: _Node, *args: Any, **kwargs: Any) -> _Node:
        blocks = {name: block for name in ("body", "else_") if isinstance(block := getattr(node, name, None), list)}
        for name in blocks:
            setattr(node, name, [])
        super().generic_visit(node, *args, **kwargs)
        if isinstance(arguments := getattr(node, "dyn_args", None), nodes.Expr):  # become a tuple before the call
            node.dyn_args = _filtered(arguments, METERED)  # type: ignore[attr-defined]
        for name, block in blocks.items():
            # A body that does nothing takes time when a loop runs it.
            if block or name == "body":
                setattr(node, name, self._counted(block, node.lineno))
        return node

    def _counted(self, block: list[nodes.Node], line: int) -> list[nodes.Node]:
        self._units.append(1)
        visited = [new for node in block for new in self.visit_list(node)]
        units = nodes.Const(self._units.pop(), lineno=line)
        return [nodes.ExprStmt(_filtered(units, SPEND), lineno=line), *visited]

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - jinja2's names
        self._units[-1] += len(node.data) // 16
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData | nodes.Const) else _filtered(child, TEXT)
            for child in node.nodes
        ]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        values: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add):
            self._units[-1] += 1
            values.append(self.visit(first.right))
            first = first.left
        values.append(self.visit(first))
        return _filtered(nodes.List(values[::-1], lineno=node.lineno), ADDED)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), JOINED)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        return self._literal(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return self._literal(node)

    def _literal(self, node: nodes.Expr) -> nodes.Node:
        is_constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        self.generic_visit(node)
        return node if is_constant else _filtered(node, MADE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, SLICED) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
