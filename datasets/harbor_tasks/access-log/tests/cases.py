"""Logs drawn at random; what is put into them is counted while they are written."""

import json
import random
import sys
from collections import Counter
from datetime import datetime, timedelta, timezone

BAD = (
    "worker 3 restarted",
    '192.0.2.44 - - [31/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 12',
    '192.0.2.44 - - [03/Feb/2026:25:00:00 +0000] "GET / HTTP/1.1" 200 12',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 12 more',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 200',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 2000 12',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" OK 12',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 12k',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "get / HTTP/1.1" 200 12',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET index.html HTTP/1.1" 200 12',
    '192.0.2.44 - - [03/Feb/2026:10:00:00 +0000] "GET /" 200 12',
    '192.0.2.44 - - 03/Feb/2026:10:00:00 +0000 "GET / HTTP/1.1" 200 12',
    '- - [03/Feb/2026:10:00:00 +0000] "GET / HTTP/1.1" 200 12',
)
PATHS = ("/", "/news", "/login", "/style.css", "/a/b/c", "/Ünïcode", "/zoo")
START = datetime(2026, 3, 5, 20, tzinfo=timezone.utc)


def check(run):
    logs = [draw(random.Random(seed), size) for seed, size in ((1, 40), (2, 400), (3, 2000))]
    logs.append(("", report([], 0)))
    for text, expected in logs:
        said = run(["python3", "/app/report.py", "some.log"], files={"some.log": text})
        if said is None or parsed(said) != expected:
            sys.stdout.write(f"of a log of {text.count(chr(10))} lines the report is {said!r}, not {expected}\n")
            return False
    return True


def parsed(said):
    try:
        return json.loads(said)
    except ValueError:
        return None


def draw(generator, size):
    lines, requests = [], []
    num_bad = 0
    for _ in range(size):
        if generator.random() < 0.15:
            lines.append(generator.choice(BAD))
            num_bad += 1
        elif generator.random() < 0.05:
            lines.append("")
        else:
            line, request = draw_request(generator)
            lines.append(line)
            requests.append(request)
    return "\n".join(lines) + "\n", report(requests, num_bad)


def draw_request(generator):
    address = f"203.0.113.{generator.randrange(6)}"
    when = START + timedelta(seconds=generator.randrange(6 * 3600))
    zone = timezone(timedelta(minutes=generator.choice((0, 60, -300, 330))))
    path = generator.choice(PATHS)
    status, size = generator.choice((200, 304, 404, 499, 500, 503)), generator.choice(("-", "0", "17", "5120"))
    asked = path + generator.choice(("", "", "?page=2", "#top", "?a=/b?c"))
    shown = when.astimezone(zone).strftime("%d/%b/%Y:%H:%M:%S %z")
    line = f'{address} - - [{shown}] "{generator.choice(("GET", "POST"))} {asked} HTTP/1.1" {status} {size}'
    return line, (address, when.strftime("%Y-%m-%dT%H"), path, status, 0 if size == "-" else int(size))


def report(requests, num_bad):
    paths = Counter(request[2] for request in requests)
    return {
        "requests": len(requests),
        "bad_lines": num_bad,
        "bytes": sum(request[4] for request in requests),
        "errors": sum(request[3] >= 500 for request in requests),
        "paths": sorted(([path, count] for path, count in paths.items()), key=lambda item: (-item[1], item[0]))[:3],
        "visitors": {
            hour: len({request[0] for request in requests if request[1] == hour})
            for hour in {request[1] for request in requests}
        },
    }
