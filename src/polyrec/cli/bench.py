"""`polyrec bench`: flags to cases, then a measurement, its table, and its JSON and picture."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..hardware.base.config import HardwareConfig
from ..models.options import ModelOptions
from .hardware_flags import hardware_flags
from .model_flags import model_flags

if TYPE_CHECKING:
    from ..bench.cases import Case, Target
    from ..bench.serve import Clients

app = typer.Typer(help="Measure the engine and the server, on a model of yours or on a synthetic one.")

Folder = Annotated[Path, typer.Argument(help="A model folder: of `polyrec train`, or of `polyrec bench make-model`.")]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        help="TOKENS:N:LOADS[:REQUESTS], as 2455:50:1,8, or hITEMS for TOKENS; repeatable, instead of the flags.",
    ),
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt, at least.")]
History = Annotated[int | None, typer.Option(min=1, help="Items of each history, instead of --tokens.")]
Width = Annotated[int, typer.Option("-n", "--n", min=1, help="Items that come back, which is the beam width.")]
Batch = Annotated[str, typer.Option(help="Requests in a batch; several as 1,8,32.")]
ClientCounts = Annotated[str, typer.Option(help="Clients that ask at once; several as 1,8,32.")]
Warmup = Annotated[int, typer.Option(min=0, help="Batches, or requests of each client, before the clock starts.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="A setting of the engine, as limits.max_requests=8.")]
Profile = Annotated[Path | None, typer.Option(help="A Chrome trace to write (chrome://tracing, Perfetto).")]
Out = Annotated[Path | None, typer.Option(help="JSON to write: all figures, date, commit and machine.")]
Plot = Annotated[Path | None, typer.Option(help="PNG to write: latency and requests per second over the load.")]
KernelPlot = Annotated[
    Path | None, typer.Option("--plot", help="PNG to write: each case's ms by family, and its roofline.")
]
CachePlot = Annotated[Path | None, typer.Option("--plot", help="PNG to write: first visits beside returning ones.")]
AsJson = Annotated[bool, typer.Option("--json", help="The JSON on standard output instead of the table.")]
Url = Annotated[str | None, typer.Option(help="A running server of FOLDER; without it, one is started.")]
ApiKey = Annotated[str | None, typer.Option(envvar="POLYREC_API_KEY", show_default=False, help="The server's key.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes that the clients are spread over, at most.")]


@app.command("make-model")
@hardware_flags
def make_model(
    folder: Annotated[Path, typer.Argument(help="The model folder to make.")],
    shape: Annotated[str, typer.Option(help="onerec-1.7b, qwen3-0.6b or tiny.")] = "onerec-1.7b",
    items: Annotated[int | None, typer.Option(min=1, help="Items of the catalog, instead of the shape's.")] = None,
    max_items: Annotated[int, typer.Option(min=1, help="Longest history of a prompt, in items.")] = 2_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and catalog.")] = 0,
    *,
    hardware: HardwareConfig,
) -> None:
    """Write a model of random weights with a catalog of random SIDs, ready to serve."""
    from ..bench.make_model import make_model as write
    from ..hardware import get_hardware_backend

    write(folder, shape, get_hardware_backend(hardware), num_items=items, max_items=max_items, seed=seed)
    _say(f"wrote {folder}")


@app.command()
@hardware_flags
@model_flags
def offline(
    folder: Folder,
    case: Cases = None,
    tokens: Tokens = 2455,
    history: History = None,
    n: Width = 50,
    batch: Batch = "1",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each case, made up to whole batches.")] = 64,
    warmup: Warmup = 5,
    set: Sets = None,
    profile: Profile = None,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
    *,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Measure the search in this process: no HTTP, prompts built beforehand."""
    from ..bench import kernels, offline
    from ..bench.cases import Target
    from ..bench.plot import plot_load

    run = _Run(hardware)
    target = Target.read(folder)
    cases = target.cases(case or [_case(tokens, history, n, batch)])
    recommender, _ = offline.load(target, cases, run.backend, options, set or ())
    columns = (
        "tokens",
        "n",
        "batch",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "requests_per_second",
        "answer_ms",
        "faulty_answers",
    )
    record = _Record(run.facts("offline", target), columns, out, as_json)
    for one in cases:
        record.add(offline.run_case(recommender, target, one, one.requests or requests, warmup))
        if profile is not None:
            trace = profile if len(cases) == 1 else _of_case(profile, one)
            kernels.write_trace(recommender, target, one, run.backend.runtime, trace)
    record.finish(plot, functools.partial(plot_load, load="batch"))


@app.command()
@hardware_flags
@model_flags
def kernels(
    folder: Folder,
    case: Cases = None,
    tokens: Tokens = 2455,
    history: History = None,
    n: Width = 50,
    batch: Batch = "1",
    batches: Annotated[int, typer.Option(min=1, help="Batches of each case.")] = 10,
    tflops: Annotated[float | None, typer.Option(help="Ceiling of plain products, TFLOP/s; else measured.")] = None,
    fp8_tflops: Annotated[float | None, typer.Option(help="Ceiling of e4m3 products, TFLOP/s; else measured.")] = None,
    tb_per_s: Annotated[float | None, typer.Option(help="Ceiling of copies, TB/s; else measured.")] = None,
    set: Sets = None,
    profile: Profile = None,
    out: Out = None,
    plot: KernelPlot = None,
    as_json: AsJson = False,
    *,
    options: ModelOptions,
    hardware: HardwareConfig,
) -> None:
    """Tell where a batch's time goes: kernels by family, gaps, share of the roofline."""
    from ..bench import kernels, offline
    from ..bench.cases import Target
    from ..bench.plot import plot_kernels
    from ..bench.report import table
    from ..bench.roofline import Ceilings, measure_ceilings

    run = _Run(hardware)
    target = Target.read(folder)
    cases = target.cases(case or [_case(tokens, history, n, batch)])
    recommender, model = offline.load(target, cases, run.backend, options, set or ())
    if tflops is None or fp8_tflops is None or tb_per_s is None:
        measured = measure_ceilings(run.backend, model)
        tflops, fp8_tflops = tflops or measured.tflops, fp8_tflops or measured.fp8_tflops
        tb_per_s = tb_per_s or measured.tb_per_s
    ceilings = Ceilings(tflops, fp8_tflops, tb_per_s)
    columns = ("tokens", "n", "batch", "wall_ms", "busy_ms", "gaps_ms", "launches", "roofline_ms", "roofline_share")
    record = _Record(run.facts("kernels", target) | {"ceilings": asdict(ceilings)}, columns, out, as_json)
    for number, one in enumerate(cases):
        trace = profile if profile is None or len(cases) == 1 else profile.with_stem(f"{profile.stem}-{number}")
        found = kernels.run_case(
            recommender, model, target, one, run.backend.runtime, ceilings, batches=batches, trace=trace
        )
        record.add(found)
        if not as_json:
            print(
                table(("family", "ms", "launches", "share"), [tuple(row.values()) for row in found["families"]]), "\n"
            )
    record.finish(plot, plot_kernels)


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    folder: Folder,
    url: Url = None,
    case: Cases = None,
    tokens: Tokens = 2455,
    history: History = None,
    n: Width = 50,
    clients: ClientCounts = "1,8,32",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each case.")] = 200,
    warmup: Warmup = 3,
    rate: Annotated[
        str | None, typer.Option(help="Requests a second at random times, several as 10,50, instead of --clients.")
    ] = None,
    processes: Processes = 4,
    api_key: ApiKey = None,
    profile: Profile = None,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server over HTTP. What follows -- goes to the `polyrec serve` that is started."""
    from ..bench import serve
    from ..bench.cases import Target
    from ..bench.plot import plot_load
    from ..core.errors import ConfigError

    if profile is not None and url is not None:
        raise ConfigError(
            "profile_elsewhere",
            "--profile is of a server that this command starts, and --url names another one.",
            "Leave one out, or start that server with --profile-dir and ask its /v1/profile/start and stop.",
        )
    run = _Run(None)
    target = Target.read(folder)
    rates = [None] if rate is None else [float(value) for value in rate.split(",")]
    cases = target.cases(case or [_case(tokens, history, n, clients if rate is None else "1")])
    own = [] if profile is None else ["--profile-dir", str(profile.parent)]
    load = "clients" if rate is None else "rate"
    columns = ("tokens", "n", load, "requests", "p50_ms", "p90_ms", "p99_ms", "requests_per_second", "faulty_answers")
    with ExitStack() as stack:
        asked, ready = _clients(stack, target, url, processes, api_key, [*own, *context.args])
        facts = run.facts("serve", target) | asked.server() | {"ready_seconds": ready, "server_options": context.args}
        record = _Record(facts, columns, out, as_json)
        for one, value in itertools.product(cases, rates):
            record.add(serve.run_case(asked, one, one.requests or requests, warmup, value))
            if profile is not None:
                single = len(cases) * len(rates) == 1
                serve.write_trace(asked, one, value, profile if single else _of_case(profile, one, value))
    record.finish(plot, functools.partial(plot_load, load=load))


@app.command(context_settings={"allow_extra_args": True})
def cache(
    context: typer.Context,
    folder: Folder,
    url: Url = None,
    case: Cases = None,
    tokens: Tokens = 2455,
    history: History = None,
    n: Width = 50,
    clients: ClientCounts = "1",
    users: Annotated[int, typer.Option(min=1, help="Users, each of whom comes twice.")] = 50,
    new_items: Annotated[int, typer.Option(min=1, help="Items that a history has grown by.")] = 4,
    processes: Processes = 4,
    api_key: ApiKey = None,
    out: Out = None,
    plot: CachePlot = None,
    as_json: AsJson = False,
) -> None:
    """Measure users who return with a few items more. What follows -- goes to the server that is started."""
    from ..bench import serve
    from ..bench.cases import Target
    from ..bench.plot import plot_returning
    from ..core.errors import ConfigError

    run = _Run(None)
    target = Target.read(folder)
    cases = target.cases(case or [_case(tokens, history, n, clients)])
    if short := next((one for one in cases if one.items <= new_items), None):
        raise ConfigError(
            "case_out_of_range",
            f"A history of {short.items} items cannot have grown by {new_items}.",
            "Ask for longer histories, or for fewer new items.",
        )
    columns = ("visit", "tokens", "n", "clients", "p50_ms", "p90_ms", "p99_ms", "requests_per_second", "faulty_answers")
    with ExitStack() as stack:
        asked, ready = _clients(stack, target, url, processes, api_key, context.args)
        facts = run.facts("cache", target) | asked.server() | {"ready_seconds": ready, "server_options": context.args}
        record = _Record(facts, columns, out, as_json)
        for one in cases:
            for visit, found in serve.run_returning(asked, one, one.requests or users, new_items).items():
                record.add({"visit": visit, **found})
    record.finish(plot, plot_returning)


class _Run:
    """The hardware of a measurement, if it is this process's, and what is written of every one."""

    def __init__(self, hardware: HardwareConfig | None) -> None:
        from ..bench.report import origin

        if hardware is not None:
            from ..hardware import get_hardware_backend

            self.backend = get_hardware_backend(hardware)
        self._origin = origin(None if hardware is None else self.backend.runtime.device_name())

    def facts(self, mode: str, target: Target) -> dict[str, Any]:
        """What the JSON of a run says besides results."""
        model = {"folder": target.path.name, "items": len(target.catalog), "depth": target.catalog.depth}
        return {"mode": mode, "origin": self._origin, "model": model}


class _Record:
    """A run's results as they come: each is told, and written with those before it. A run that is stopped keeps what it has."""

    def __init__(self, facts: dict[str, Any], columns: Sequence[str], out: Path | None, as_json: bool) -> None:
        from ..core.files import prepare_file

        self._facts, self._columns, self._out, self._as_json = facts, columns, out, as_json
        self._results: list[dict[str, Any]] = []
        if out is not None:
            prepare_file(out)  # before hours of measuring, not behind them

    def add(self, result: dict[str, Any]) -> None:
        """That of one more case."""
        from ..bench.report import line

        self._results.append(result)
        try:
            self._write(finished=False)
        finally:  # also where the disk is full
            _say(line(self._columns, [result.get(column) for column in self._columns]))

    def finish(self, plot: Path | None, draw: Callable[[Sequence[dict[str, Any]], Path], None]) -> None:
        """Prints, writes and draws all; exit status 1 when an answer was wrong."""
        from ..bench.report import table

        if self._as_json:
            print(json.dumps(self._all(finished=True)))
        else:
            print(table(self._columns, [[result.get(column) for column in self._columns] for result in self._results]))
        self._write(finished=True)
        if plot is not None:
            draw(self._results, plot)
        wrong = [result for result in self._results if result.get("faulty_answers")]
        for result in wrong:
            _say(f"{result['faulty_answers']} of {result['requests']} answers are wrong: {result['first_fault']}")
        if wrong:
            raise typer.Exit(1)

    def _all(self, *, finished: bool) -> dict[str, Any]:
        return {**self._facts, "finished": finished, "results": self._results}

    def _write(self, *, finished: bool) -> None:
        """To the file, if there is one."""
        from ..core.files import write_json

        if self._out is not None:
            write_json(self._out, self._all(finished=finished))


def _case(tokens: int, history: int | None, n: int, loads: str) -> str:
    return f"{tokens if history is None else f'h{history}'}:{n}:{loads}"


def _of_case(profile: Path, case: Case, rate: float | None = None) -> Path:
    """The trace of one case among several."""
    load = case.load if rate is None else f"{rate:g}"
    return profile.with_stem(f"{profile.stem}-{case.items}-{case.n}-{load}")


def _clients(
    stack: ExitStack, target: Target, url: str | None, processes: int, api_key: str | None, options: Sequence[str]
) -> tuple[Clients, float | None]:
    """Clients of the server at `url`, or of one that runs while `stack` is open; then also the seconds until it was ready."""
    from ..bench.serve import Clients
    from ..bench.server import own_server
    from ..core.errors import ConfigError

    if url is not None and options:
        raise ConfigError(
            "server_options_unused", f"{' '.join(options)} would go to a server that --url replaces.", "Leave one out."
        )
    ready = None
    if url is None:
        key = [] if api_key is None else ["--api-key", api_key]
        url, ready = stack.enter_context(own_server(target.path, [*key, *options]))
    return Clients(url, target, processes, api_key), ready


def _say(text: str) -> None:
    from ..core.console import status_console

    status_console().print(text, highlight=False, markup=False, soft_wrap=True)
