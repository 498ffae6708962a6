"""The command line. Nothing heavy loads before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Fit a trained neural network to a chip.", pretty_exceptions_enable=False
)
platforms = typer.Typer(help="What chips can do: built-in descriptions and your own.", invoke_without_command=True)
app.add_typer(platforms, name="platforms")

ModelArg = Annotated[str, typer.Argument(help="a .pt2 file (torch.export.save), or module:factory")]
DataOpt = Annotated[str, typer.Option("--data", help=".npz (x, and y for accuracy), a folder of images, or module:iterable")]
PlatformOpt = Annotated[str, typer.Option("--platform", "-p", help="built-in name, NAME@REVISION, or a YAML file")]
WeightsOpt = Annotated[Path | None, typer.Option("--weights", help="safetensors for module:factory")]
SizeOpt = Annotated[int, typer.Option("--input-size", help="side of the square that images are resized to [pixels]")]


def main() -> None:
    """Entry point: typed errors become one readable panel and exit code 2."""
    from chipfit.errors import ChipfitError

    try:
        app()
    except ChipfitError as e:
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        Console(stderr=True).print(Panel(Text(str(e)), title=type(e).__name__, border_style="red"))
        raise SystemExit(2) from None


@app.command()
def quantize(
    model: ModelArg,
    data: DataOpt,
    platform: PlatformOpt = "ort_cpu",
    out: Annotated[Path, typer.Option("--out", "-o", help="folder for plan, model file and report")] = Path("chipfit_out"),
    weights: WeightsOpt = None,
    rule: Annotated[str, typer.Option("--rule", help="range rule for activations")] = "mse",
    keep_float: Annotated[list[str] | None, typer.Option("--float", help="keep a layer in float (repeatable)")] = None,
    bits: Annotated[list[str] | None, typer.Option("--bits", help="LAYER=BITS, weight bits of a layer (repeatable)")] = None,
    input_size: SizeOpt = 224,
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="run ONNX Runtime and compare integers")] = True,
) -> None:
    """Quantize a model for a platform; write its file, its plan and a report."""
    from chipfit import pipeline
    from chipfit.cli_inputs import load_data, load_model, parse_bits

    network, batches = load_model(model, weights), load_data(data, input_size)
    overrides: dict[str, Any] = {**dict.fromkeys(keep_float or (), "float"), **parse_bits(bits or [])}
    result = pipeline.quantize(network, batches, platform, rule=rule, overrides=overrides)
    file = result.export(out / "model.onnx")
    if check and result.platform.math.requant:
        result.verify(batches, batches=4)
    result.save(out / "plan")
    page = result.report.save(out / "report.html")
    result.report.show()
    typer.echo(f"model   {file}\nplan    {out / 'plan'}\nreport  {page}")


@app.command()
def verify(
    saved: Annotated[Path, typer.Argument(help="folder that `quantize` or Result.save wrote")],
    data: DataOpt,
    runtime: Annotated[str, typer.Option("--runtime", help="onnxruntime or openvino")] = "onnxruntime",
    file: Annotated[Path | None, typer.Option("--file", help="the deployed file; exported again when omitted")] = None,
    input_size: SizeOpt = 224,
) -> None:
    """Run a saved result on its runtime and compare integer by integer. Exit code 1 when an operator departs."""
    from chipfit import pipeline
    from chipfit.cli_inputs import load_data

    result = pipeline.load(saved / "plan" if (saved / "plan").is_dir() else saved)
    found = result.verify(load_data(data, input_size), runtime=runtime, path=file)
    typer.echo(found.summary())
    raise typer.Exit(0 if found.sound or not found.promised else 1)


@app.command()
def lint(
    model: ModelArg,
    shape: Annotated[str, typer.Option("--input-shape", help="comma-separated, batch first: 1,3,224,224")],
    platform: PlatformOpt = "ort_cpu",
    weights: WeightsOpt = None,
) -> None:
    """Will it run and fuse on this target? Needs no data."""
    from rich.console import Console
    from rich.table import Table

    from chipfit import pipeline
    from chipfit.cli_inputs import load_model, parse_shape

    found = pipeline.lint(load_model(model, weights), parse_shape(shape), platform)
    table = Table("layer", "operator", "runs in", "fused into", "why float", show_edge=False, header_style="bold")
    for n in found.rows:
        table.add_row(n.layer or n.name, n.op, n.exec, n.group if n.group != n.name else "", n.why)
    console = Console()
    console.print(table)
    for note in found.notes:
        console.print(f"[dim]{note}[/]")
    console.print(f"{sum(n.exec != 'float' for n in found.rows)} of {len(found.rows)} operators run in integers on {found.platform.name}")


@app.command()
def explain(
    saved: Annotated[Path, typer.Argument(help="folder that `quantize` or Result.save wrote")],
    layer: Annotated[str, typer.Argument(help="layer path, glob, operator or layer type")],
) -> None:
    """Everything that was decided about a layer, and why."""
    from chipfit import pipeline
    from chipfit.overrides import match_layers

    result = pipeline.load(saved / "plan" if (saved / "plan").is_dir() else saved)
    for node in match_layers(result.graph, layer):
        decided = result.plan.nodes[node.name]
        group = f", one kernel with '{decided.group}'" if decided.group and decided.group != node.name else ""
        typer.echo(f"{node.op} '{node.layer or node.name}': runs in {decided.exec}{group}{': ' + decided.why if decided.why else ''}")
        for name in dict.fromkeys([*(i for i in node.inputs if i), *node.outputs]):
            t = result.plan.tensors.get(name)
            if t is None:
                continue
            if not t.quantized or t.scale is None or t.zero_point is None or t.grid is None:
                typer.echo(f"  {t.role} {name}: float, {t.why}")
                continue
            scale = (
                f"{float(t.scale):.6g}"
                if t.scale.dim() == 0
                else f"{float(t.scale.min()):.3g}..{float(t.scale.max()):.3g}, one per channel"
            )
            zero = int(t.zero_point.reshape(-1)[0])
            typer.echo(f"  {t.role} {name}: {t.format}, codes {t.grid.qmin}..{t.grid.qmax}, scale {scale}, zero point {zero}; {t.origin}")


@platforms.callback()
def _platforms(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        platforms_list()


@platforms.command("list")
def platforms_list() -> None:
    """One line per built-in platform."""
    from rich.console import Console

    from chipfit.platform.show import overview

    Console().print(overview())


@platforms.command("show")
def platforms_show(name: Annotated[str, typer.Argument(help="built-in name or YAML file")]) -> None:
    """Every fact about a platform, with its source and confidence."""
    from rich.console import Console

    from chipfit.platform.load import load
    from chipfit.platform.show import show

    Console().print(show(load(name)))


@platforms.command("check")
def platforms_check(file: Annotated[Path, typer.Argument(help="YAML file")]) -> None:
    """Read a platform file and say what is wrong with it."""
    from chipfit.platform.load import load

    p = load(str(file) if file.suffix in (".yaml", ".yml") else file)
    typer.echo(f"{p.name}: {len(p.formats)} formats, {len(p.ops)} rules, {len(p.fuse)} fusions; no problem found")
    if not p.math.requant:
        typer.echo("math.requant is absent: chipfit will not claim exactness for this platform")


@app.command()
def demo(out: Annotated[Path, typer.Option("--out", "-o", help="folder for the files")] = Path("demo_out")) -> None:
    """Train a small network on handwritten digits, quantize it, export it, run it, prove it."""
    from chipfit.demo import run

    run(out)


if __name__ == "__main__":
    main()
