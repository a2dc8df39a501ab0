"""The few documents that are generated: service logs and dialogues that call tools. Seeded."""

from __future__ import annotations

import json
import random
from datetime import datetime, timedelta
from typing import Any

from exl3eval.errors import SuiteError

_LOG_LINES = 240
_TOOL_ROUNDS = 60


def log_lines(kind: str, *, seed: int) -> str:
    """Write a log of `kind` ("system", "access" or "jobs").

    Raises
    ------
    SuiteError
        If the kind is unknown.
    """
    writers = {"system": _system_line, "access": _access_line, "jobs": _job_line}
    if kind not in writers:
        raise SuiteError(f"unknown log kind {kind!r}", hint=f"use one of {', '.join(writers)}")
    draw = random.Random(f"{seed}:{kind}")
    now = datetime(2026, 3, draw.randint(1, 28), draw.randint(0, 23), draw.randint(0, 59))
    lines = []
    for _ in range(_LOG_LINES):
        now += timedelta(milliseconds=int(draw.expovariate(1 / 2600)))
        lines.append(writers[kind](draw, now))
    return "\n".join(lines) + "\n"


def _system_line(draw: random.Random, now: datetime) -> str:
    unit, pid = draw.choice(["sshd", "kernel", "chronyd", "postgres", "dockerd", "cron"]), draw.randint(300, 32000)
    address = ".".join(str(draw.randint(1, 254)) for _ in range(4))
    device = f"{draw.choice(['sd', 'nvme'])}{draw.choice('abcd')}{draw.randint(1, 3)}"
    text = {
        "sshd": draw.choice(
            [
                f"Accepted publickey for {draw.choice(['mira', 'tobias', 'deploy', 'anwar'])} from {address}"
                f" port {draw.randint(1024, 65000)} ssh2: ED25519",
                f"Connection closed by {address} port {draw.randint(1024, 65000)} [preauth]",
                f"Invalid user {draw.choice(['admin', 'oracle', 'test', 'pi'])} from {address}",
            ]
        ),
        "kernel": draw.choice(
            [
                f"EXT4-fs ({device}): re-mounted. Quota mode: {draw.choice(['none', 'writeback'])}.",
                f"perf: interrupt took too long ({draw.randint(2500, 9000)} > {draw.randint(2000, 2499)})",
                f"eth{draw.randint(0, 3)}: link {draw.choice(['down', 'up, 1000 Mbps, full duplex'])}",
                f"oom-kill: task=worker,pid={draw.randint(300, 32000)},uid={draw.randint(0, 1200)}",
            ]
        ),
        "chronyd": f"Selected source {address}, offset {draw.uniform(-0.05, 0.05):+.6f} s",
        "postgres": draw.choice(
            [
                f"LOG:  checkpoint complete: wrote {draw.randint(3, 4800)} buffers ({draw.uniform(0, 30):.1f}%);"
                f" write={draw.uniform(0, 120):.3f} s, sync={draw.uniform(0, 1):.3f} s",
                f"LOG:  duration: {draw.uniform(200, 9000):.3f} ms  statement: SELECT count(*) FROM"
                f" {draw.choice(['orders', 'parcels', 'readings'])} WHERE id > {draw.randint(1000, 900000)}",
                'ERROR:  duplicate key value violates unique constraint "parcels_pkey"',
            ]
        ),
        "dockerd": f'level={draw.choice(["info", "warning"])} msg="container {draw.getrandbits(48):012x}'
        f' {draw.choice(["health check failed", "exited", "started"])}" attempt={draw.randint(1, 5)}',
        "cron": f"(root) CMD (/usr/local/bin/{draw.choice(['rotate', 'backup', 'sync-mirror'])} --keep"
        f" {draw.randint(2, 30)})",
    }[unit]
    return f"{now.strftime('%b %d %H:%M:%S')} node{draw.randint(1, 6)} {unit}[{pid}]: {text}"


def _access_line(draw: random.Random, now: datetime) -> str:
    path = draw.choice(
        [
            f"/api/v2/stations/{draw.randint(1, 999)}/readings?limit={draw.choice([10, 50, 200])}",
            f"/assets/{draw.getrandbits(32):08x}.{draw.choice(['js', 'css', 'woff2'])}",
            f"/maps/{draw.randint(3, 15)}/{draw.randint(0, 9999)}/{draw.randint(0, 9999)}.png",
            "/login",
            f"/search?q={draw.choice(['tide', 'bridge', 'harbour', 'night+train'])}&page={draw.randint(1, 40)}",
        ]
    )
    agent = draw.choice(["Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/147.0", "curl/8.9.1", "feedbot/3.2"])
    status = draw.choices([200, 304, 404, 302, 500, 429], weights=[70, 12, 7, 6, 3, 2])[0]
    address = f"{draw.randint(11, 190)}.{draw.randint(0, 255)}.{draw.randint(0, 255)}.{draw.randint(1, 254)}"
    stamp = now.strftime("%d/%b/%Y:%H:%M:%S +0000")
    return (
        f'{address} - {draw.choice(["-", "mira", "anwar"])} [{stamp}] "{draw.choice(["GET", "GET", "POST"])} {path}'
        f' HTTP/1.1" {status} {draw.randint(120, 90000)} "{agent}" {draw.uniform(0.001, 2.4):.3f}'
    )


def _job_line(draw: random.Random, now: datetime) -> str:
    event = draw.choice(["claimed", "finished", "retry", "heartbeat", "failed"])
    fields: dict[str, Any] = {
        "ts": now.isoformat(timespec="milliseconds") + "Z",
        "level": {"retry": "warn", "failed": "error"}.get(event, "info"),
        "event": event,
        "job": f"{draw.choice(['thumbnail', 'invoice', 'reindex', 'export'])}-{draw.getrandbits(40):010x}",
        "worker": f"w{draw.randint(1, 24):02d}",
    }
    if event in ("finished", "failed"):
        fields["seconds"] = round(draw.uniform(0.02, 95), 3)
    if event in ("retry", "failed"):
        fields["error"] = draw.choice(["timeout after 30 s", "checksum mismatch", "connection reset by peer"])
    return json.dumps(fields)


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TOPICS = {
    "travel": (
        _tool("find_trains", "List trains between two stations.", origin="string", target="string", date="string"),
        _tool("hold_seat", "Hold a seat on a train.", train="string", seat="string"),
    ),
    "weather": (
        _tool("forecast", "Give the forecast for a place and a day.", place="string", date="string"),
        _tool("tide_table", "Give high and low water for a harbour.", harbour="string", date="string"),
    ),
    "warehouse": (
        _tool("stock_level", "Count an article in a warehouse.", article="string", warehouse="string"),
        _tool("order_parts", "Order an article.", article="string", quantity="integer"),
    ),
}
_PLACES = [
    "Porto",
    "Tromsø",
    "Lviv",
    "Aomori",
    "Galway",
    "Bergen",
    "Trieste",
    "Cádiz",
    "Gdańsk",
    "Nantes",
    "Izmir",
    "Split",
    "Tartu",
    "Bruges",
    "Turku",
]
_ARTICLES = [
    "hinge",
    "bearing",
    "gasket",
    "flange",
    "bracket",
    "spindle",
    "washer",
    "coupling",
    "bushing",
    "nozzle",
    "clamp",
    "pulley",
]
_ASKS = (
    "Could you check {what} for me?",
    "What do you find for {what}?",
    "Next one: {what}, please.",
    "I also need to know about {what} before noon.",
    "My colleague wonders about {what}. Anything there?",
)
_TELLS = (
    "Here is what came back: {facts}.",
    "Done. In short, {facts}.",
    "The result: {facts}. Tell me if you want the next one as well.",
    "I looked it up; {facts}.",
)


def tool_dialogue(topic: str, *, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Write a dialogue in which the assistant calls tools and reports what they returned.

    Returns
    -------
    tools, messages : lists of dict
        In the form that chat templates take; each call's arguments are an object.

    Raises
    ------
    SuiteError
        If the topic is unknown.
    """
    if topic not in _TOPICS:
        raise SuiteError(f"unknown dialogue topic {topic!r}", hint=f"use one of {', '.join(_TOPICS)}")
    tools = _TOPICS[topic]
    draw = random.Random(f"{seed}:{topic}")
    messages: list[dict[str, Any]] = []
    for _ in range(_TOOL_ROUNDS):
        tool = draw.choice(tools)["function"]
        arguments = {key: _argument(draw, key) for key in tool["parameters"]["properties"]}
        result = _result(draw, tool["name"])
        what = ", ".join(str(value) for value in arguments.values())
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in result.items())
        call = {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}
        messages += [
            {"role": "user", "content": draw.choice(_ASKS).format(what=what)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": tool["name"], "content": json.dumps(result, ensure_ascii=False)},
            {"role": "assistant", "content": draw.choice(_TELLS).format(facts=facts)},
        ]
    return list(tools), messages


def _argument(draw: random.Random, key: str) -> str | int:
    if key == "date":
        return f"2026-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
    if key == "quantity":
        return draw.randint(2, 900)
    if key == "train":
        return f"{draw.choice(['IC', 'RE', 'NJ'])} {draw.randint(100, 2999)}"
    if key == "seat":
        return f"{draw.randint(1, 14)}-{draw.randint(11, 98)}{draw.choice('ABCD')}"
    if key == "article":
        return f"{draw.choice(_ARTICLES)} {draw.choice('MKTR')}{draw.randint(3, 64)}"
    return draw.choice(_PLACES)


def _result(draw: random.Random, name: str) -> dict[str, Any]:
    clock = f"{draw.randint(0, 23):02d}:{draw.randint(0, 59):02d}"
    results: dict[str, dict[str, Any]] = {
        "find_trains": {"departure": clock, "changes": draw.randint(0, 3), "minutes": draw.randint(25, 780)},
        "hold_seat": {"reference": f"{draw.getrandbits(32):08X}", "price": round(draw.uniform(9, 240), 2)},
        "forecast": {"low": draw.randint(-12, 18), "high": draw.randint(-2, 36), "rain_mm": draw.randint(0, 40)},
        "tide_table": {"high_water": clock, "metres": round(draw.uniform(0.4, 6.2), 2)},
        "stock_level": {"on_hand": draw.randint(0, 4000), "reserved": draw.randint(0, 300), "bin": f"A{clock}"},
        "order_parts": {"order": draw.randint(100000, 999999), "delivery_days": draw.randint(1, 45)},
    }
    return results[name]
