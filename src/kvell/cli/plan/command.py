"""``kvell plan``: the requests that fit, per layer group, for a config and a memory size."""

import functools
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvell.cli.plan.configs import gguf_tensors, load_config
from kvell.cli.plan.report import (
    DEVICES_BYTES,
    ONE_GPU,
    DeviceFit,
    PlanReport,
    Taken,
    device_fit,
    device_table,
    fit_table,
    group_table,
    make_report,
    summary_lines,
)
from kvell.cli.terminal.commands import EngineCommand
from kvell.cli.terminal.files import config_names
from kvell.cli.terminal.options import (
    SIZE,
    json_option,
    models_argument,
    setting_option,
)
from kvell.cli.terminal.session import Session, debug_option
from kvell.device.available import default_kv_memory_bytes
from kvell.engine.requests.limits import Limits
from kvell.errors import ChangeSomething
from kvell.models.config.kv_dtypes import ELEMENT_BYTES, KV_DTYPES, kv_dtype_named
from kvell.pages.layout import LayerSpec, Layout
from kvell.pages.sizing import Manager, plan_layout

if TYPE_CHECKING:
    from kvell.models.config.description import ModelDescription
    from kvell.models.gguf.gguf_file import GgufTensor


def _show_families(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:
        return
    from kvell.models.families.families import family_names

    click.echo("\n".join(textwrap.wrap(", ".join(family_names()), 79)))
    ctx.exit()


def _show_models(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
    if not is_given or ctx.resilient_parsing:
        return
    from kvell.models.sources.packaged import MODEL_NAME

    click.echo("\n".join(sorted({*config_names(), MODEL_NAME})))
    ctx.exit()


@click.command(cls=EngineCommand)
@models_argument
@setting_option("kv_memory_bytes")
@setting_option("dtype")
@setting_option("kv_cache_dtype")
@setting_option("hf_overrides")
@setting_option("manager")
@click.option(
    "--gpu-memory",
    "gpu_memories_bytes",
    type=SIZE,
    multiple=True,
    help="Memory of a GPU, such as 192GiB, for the table of GPUs; may be repeated. "
    "Without it: 24, 80 and 141 GB.",
)
@click.option(
    "--families",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_families,
    help="Show the families of models that are served, and exit.",
)
@click.option(
    "--models",
    "shows_models",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_models,
    help="Show the names that MODEL may have besides paths and hub ids, and exit.",
)
@json_option
@debug_option
@click.pass_obj
def plan(
    session: Session,
    models: tuple[str, ...],
    kv_memory_bytes: int | None,
    dtype: str,
    kv_cache_dtype: str,
    hf_overrides: str | None,
    manager: Manager,
    gpu_memories_bytes: tuple[int, ...],
    as_json: bool,
) -> None:
    """Show what fits; MODEL may also be a config.json. Loads no weights."""
    from kvell.models.config.description import describe
    from kvell.models.sources.named_sources import named_sources

    pool_bytes = kv_memory_bytes or default_kv_memory_bytes(session.available_bytes())
    named = named_sources(models[0], models[1:])
    given = [hf_overrides, *(None for _ in named[1:])]
    loaded = [load_config(model.source, session, o) for model, o in zip(named, given, strict=True)]
    configs = [config for config, _ in loaded]
    stored = KV_DTYPES[kv_dtype_named(kv_cache_dtype, dtype)]
    sizes = (stored.element_bytes, stored.scale_bytes, ELEMENT_BYTES[dtype])
    described = [describe(config, *sizes) for config in configs]
    names = [model.name if len(named) > 1 else "" for model in named]
    layers = layers_of(dict(zip(names, described, strict=True)))
    layout = plan_layout(layers, pool_bytes, manager=manager)
    if gpu_memories_bytes and len(named) > 1:
        problem = "a GPU's table is of one model"
        raise ChangeSomething("--gpu-memory", len(named), problem, "plan each model by itself")
    first, *others = (
        of_gguf(
            replace(
                make_report(model.name, description, manager, layout, name),
                refusal=refusal_of(config),
                taken=taken_beside(config, ELEMENT_BYTES[dtype]),
                stored_as=stored_as(config, dtype),
            ),
            gguf_tensors(path),
            config,
            dtype,
        )
        for model, name, (config, path), description in zip(
            named, names, loaded, described, strict=True
        )
    )
    report = replace(first, beside=tuple(others))
    if not others:
        layout_of = functools.partial(plan_layout, layers, manager=manager)
        memories = gpu_memories_bytes or DEVICES_BYTES
        devices = fits_on_devices(memories, layout_of, first.taken, first.lengths_tokens)
        report = replace(first, devices=devices)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    else:
        _print(report)


def layers_of(models: Mapping[str, "ModelDescription"]) -> list[LayerSpec]:
    return [
        replace(layer, model=name)
        for name, description in models.items()
        for layer in description.layers
    ]


def taken_beside(config: Any, element_bytes: int) -> Taken:
    """Return the bytes of weights, and of activations of the largest step with default limits."""
    from kvell.models.config.activations import activation_model
    from kvell.models.families.weight_sizes import weights_bytes

    limits = Limits()
    step = activation_model(config).need_bytes(limits.max_num_batched_tokens, limits.max_num_seqs)
    return Taken(weights_bytes(config, element_bytes), step)


def fits_on_devices(
    memories_bytes: Sequence[int],
    layout_of: Callable[[int], Layout],
    taken: Taken,
    lengths_tokens: Sequence[int],
) -> tuple[DeviceFit, ...]:
    """Return the requests that fit on each GPU; none if the weights' size is unknown."""
    from kvell.engine.setup.sizes import GPU_KV_SHARE

    if taken.weights_bytes is None:
        return ()
    taken_bytes = taken.weights_bytes + taken.step_bytes
    return tuple(
        device_fit(memory_bytes, taken_bytes, GPU_KV_SHARE, layout_of, lengths_tokens)
        for memory_bytes in memories_bytes
    )


def refusal_of(config: Any) -> str:
    """Return the reason why ``generate`` and ``serve`` would refuse the model, or ""."""
    from kvell.models.families.refusals import check_architecture

    try:
        check_architecture(config)
    except ChangeSomething as refusal:
        return f"{refusal.value} {refusal.problem}"
    return ""


def of_gguf(
    report: PlanReport, tensors: "Mapping[str, GgufTensor]", config: Any, dtype: str
) -> PlanReport:
    """Return the report with what a GGUF file's weights take; as it is without tensors of one."""
    from kvell.models.families.families import fused_class
    from kvell.models.gguf.gguf_tensors import memory_bytes, types_line

    if not tensors:
        return report
    if fused_class(config) is None:
        return replace(report, stored_as=types_line(tensors, _dtype_name(dtype)))
    taken = replace(report.taken, weights_bytes=memory_bytes(tensors, ELEMENT_BYTES[dtype]))
    return replace(report, stored_as=types_line(tensors, "int4 and int8"), taken=taken)


def _dtype_name(dtype: str) -> str:
    return "bfloat16" if dtype == "auto" else dtype


def stored_as(config: object, dtype: str) -> str:
    """Return the quantisation of a checkpoint that is served, and its form in memory, or ""."""
    from kvell.models.families.families import fused_class
    from kvell.models.families.quantised_schemes import scheme_of, without_quantiser

    try:
        scheme = scheme_of(config, "")
    except ChangeSomething:
        return ""
    if scheme is None:
        return ""
    form = scheme.kernel_form if fused_class(without_quantiser(config)) else ""
    return scheme.read_into(form or _dtype_name(dtype))


def _print(report: PlanReport) -> None:
    from kvell.cli.terminal.figures import wide_console

    console = wide_console()
    for line in summary_lines(report):
        click.echo(line)
    console.print(group_table(report))
    for model_report in (report, *report.beside):
        console.print(fit_table(model_report))
    if report.devices:
        console.print(device_table(report))
        click.echo(ONE_GPU)
