"""Python code of templates that takes each operation's units from the rendering's budget."""

from collections.abc import Sequence

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from typing_extensions import override

from kvell.models.text.rendering.budget import MADE_SHIFT, Datum

BUDGET = "budget"
"""The name of the budget in generated code; names of templates have prefixes there."""
LITERALS = (nodes.Tuple, nodes.List, nodes.Dict)
SEARCHES = frozenset({"in", "notin"})
UNITS: dict[type[nodes.Node], int] = {
    nodes.Const: 0,
    nodes.Name: 0,
    nodes.TemplateData: 0,
    nodes.Getattr: 8,
    nodes.Getitem: 2,
}
"""Units of an operation that is in a loop or macro, by their times; 1 for others."""


class CountingGenerator(CodeGenerator):
    """jinja's generator, with a call of the :class:`RenderBudget` in each operation.

    Comparisons with constants, attributes and conditions take no units: their work does not grow.
    """

    def __init__(self, *args: Datum, **kwargs: Datum) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: dict[int, int] = {}
        self._tests: set[int] = set()
        self._shown_sums: set[int] = set()

    @override
    def write_commons(self) -> None:
        super().write_commons()
        self.writeline(f"{BUDGET} = context.budget")

    @override
    def _make_finalize(self) -> Datum:
        return self._FinalizeInfo(None, f"{BUDGET}.show(")

    @override
    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self._bodies[id(node.body)] = 1 + _units(node.body)
        if node.test is not None:
            self._tests.add(id(node.test))
        super().visit_For(node, frame)

    @override
    def macro_body(self, node: Datum, frame: Frame) -> Datum:
        self._bodies[id(node.body)] = _units(node.body)
        return super().macro_body(node, frame)

    @override
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        for block in node.find_all(nodes.Block):
            self._bodies[id(block.body)] = _units(block.body)
        super().visit_Template(node, frame)

    @override
    def blockvisit(self, nodes: Datum, frame: Frame) -> None:
        if (units := self._bodies.get(id(nodes))) is not None:
            self.writeline(f"{BUDGET}.charge({units})")
        super().blockvisit(nodes, frame)

    @override
    def visit(self, node: nodes.Node, *args: Datum, **kwargs: Datum) -> Datum:
        closing = ""
        if id(node) in self._tests:
            self._tests.discard(id(node))
            self.write(f"({BUDGET}.charge() and ")
            closing = ")"
        if isinstance(node, LITERALS) and not (_is_stored(node) or _is_constant(node)):
            self.write(f"{BUDGET}.nest(")
            closing += ")"
        result = super().visit(node, *args, **kwargs)
        if closing:
            self.write(closing)
        return result

    @override
    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Datum) -> None:
        super()._output_child_pre(node, frame, self._shown(node, finalize))

    @override
    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Datum) -> None:
        super()._output_child_post(node, frame, self._shown(node, finalize))

    def _shown(self, node: nodes.Expr, finalize: Datum) -> Datum:
        if isinstance(node, nodes.Add):
            self._shown_sums.add(id(node))
        elif not isinstance(node, nodes.Const):
            return finalize
        return self._FinalizeInfo(None, None)

    @override
    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        chars = sum(map(_constant_chars, node.nodes))
        if chars:
            self.writeline(f"{BUDGET}.left -= {1 + (chars >> MADE_SHIFT)}")
        super().visit_Output(node, frame)

    @override
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        terms: list[nodes.Node] = [node.right]
        left: nodes.Node = node.left
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        method = "show_sum" if id(node) in self._shown_sums else "add"
        self._call(method, [left, *reversed(terms)], frame)

    @override
    def visit_Sub(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._call("subtract", [node.left, node.right], frame)

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        joins = "markup_join if context.eval_ctx.autoescape else str_join"
        self.write(f"({joins})({BUDGET}.texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    @override
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        names = [operand.op for operand in node.ops]
        is_cheap = len(names) == 1 and _is_cheap(names[0], *operands)
        self.write("(")
        for name, operand in zip(("", *names), operands, strict=True):
            self.write(f" {operators[name]} " if name else "")
            if is_cheap or isinstance(operand, nodes.Const):
                self.visit(operand, frame)
            else:
                self._call("search" if name in SEARCHES else "take_read", [operand], frame)
        self.write(")")

    @override
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._call("skim", [node.node], frame)
            self.write("[")
            self.visit(node.arg, frame)
            self.write("]")
        elif isinstance(node.arg, nodes.Const):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._call("take_key", [node.arg], frame)
            self.write(")")

    def _call(self, name: str, arguments: Sequence[nodes.Node], frame: Frame) -> None:
        self.write(f"{BUDGET}.{name}(")
        for argument in arguments:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


def _is_stored(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Tuple) and node.ctx != "load"


def _constant_chars(node: nodes.Expr) -> int:
    if isinstance(node, nodes.TemplateData):
        return len(node.data)
    return len(str(node.value)) if isinstance(node, nodes.Const) else 0


def _is_cheap(operator: str, left: nodes.Expr, right: nodes.Expr) -> bool:
    if operator in SEARCHES:
        return _is_constant(right)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.Dict):
        parts: Sequence[nodes.Expr] = [
            part for item in node.items for part in (item.key, item.value)
        ]
        return all(map(_is_constant, parts))
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _units(body: Sequence[nodes.Node]) -> int:
    units = 0
    pending = list(body)
    while pending:
        node = pending.pop()
        units += UNITS.get(type(node), 1)
        if not isinstance(node, nodes.Macro | nodes.CallBlock):
            inner = ("iter", "else_") if isinstance(node, nodes.For) else None
            pending.extend(node.iter_child_nodes(only=inner))
    return units
