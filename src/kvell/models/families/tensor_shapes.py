"""Shapes of the tensors of modules that many families have."""

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


def linear_shapes(name: str, out: int, width: int, has_bias: bool = False) -> Shapes:
    weight: Shapes = {f"{name}.weight": (out, width)}
    return weight | {f"{name}.bias": (out,)} if has_bias else weight


def mlp_shapes(name: str, hidden: int, inner: int, has_bias: bool = False) -> Shapes:
    return {
        **linear_shapes(f"{name}.gate_proj", inner, hidden, has_bias),
        **linear_shapes(f"{name}.up_proj", inner, hidden, has_bias),
        **linear_shapes(f"{name}.down_proj", hidden, inner, has_bias),
    }


def numbered_shapes(name: str, count: int, layer: Shapes) -> Shapes:
    return {
        f"{name}.{index}.{tensor}": shape
        for index in range(count)
        for tensor, shape in layer.items()
    }
