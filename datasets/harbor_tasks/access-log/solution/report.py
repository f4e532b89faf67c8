"""Sums up a web server's log: python3 report.py LOG."""

import json
import re
import sys
from collections import Counter, defaultdict
from datetime import datetime, timezone

LINE = re.compile(
    r"(\S+) - - \[(\d{2}/[A-Z][a-z]{2}/\d{4}:\d{2}:\d{2}:\d{2} [+-]\d{4})\] "
    r'"[A-Z]+ (/\S*) HTTP/[0-9.]+" (\d{3}) (\d+|-)',
    re.ASCII,
)


def read(line):
    match = LINE.fullmatch(line)
    if match is None:
        return None
    address, date, path, status, size = match.groups()
    try:
        hour = datetime.strptime(date, "%d/%b/%Y:%H:%M:%S %z").astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return address, f"{hour:%Y-%m-%dT%H}", re.split("[?#]", path)[0], int(status), 0 if size == "-" else int(size)


def main():
    with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
        lines = [line for line in file.read().split("\n") if line.strip()]
    requests = [request for request in map(read, lines) if request]
    paths = Counter(path for _, _, path, _, _ in requests)
    visitors = defaultdict(set)
    for address, hour, _, _, _ in requests:
        visitors[hour].add(address)
    report = {
        "requests": len(requests),
        "bad_lines": len(lines) - len(requests),
        "bytes": sum(size for _, _, _, _, size in requests),
        "errors": sum(status >= 500 for _, _, _, status, _ in requests),
        "paths": sorted(paths.items(), key=lambda item: (-item[1], item[0]))[:3],
        "visitors": {hour: len(addresses) for hour, addresses in visitors.items()},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
