"""Prints the steps of a build in the order in which to run them."""

import heapq
import sys


def read(lines):
    needs = {}
    for line in map(str.strip, lines):
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(":")
        needs.setdefault(name.strip(), set()).update(rest.split())
        for other in rest.split():
            needs.setdefault(other, set())
    return needs


def order(needs):
    """What can be ordered; steps in circles, and those that need them, are missing."""
    missing = {name: len(others) for name, others in needs.items()}
    users = turned(needs)
    ready = [name for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    done = []
    while ready:
        name = heapq.heappop(ready)
        done.append(name)
        for user in users[name]:
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, user)
    return done


def turned(needs):
    users = {name: set() for name in needs}
    for name, others in needs.items():
        for other in others:
            users[other].add(name)
    return users


def circles(needs):
    """Those that reach themselves, by Kosaraju's two walks without recursion."""
    finished, seen = [], set()
    for start in needs:
        stack = [(start, iter(needs[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            name, others = stack[-1]
            for other in others:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(needs[other])))
                    break
            else:
                finished.append(name)
                stack.pop()
    users, placed, found = turned(needs), set(), []
    for start in reversed(finished):
        group, stack = [], [start] if start not in placed else []
        placed.add(start)
        while stack:
            name = stack.pop()
            group.append(name)
            fresh = users[name] - placed
            placed |= fresh
            stack.extend(fresh)
        if len(group) > 1 or (group and group[0] in needs[group[0]]):
            found.extend(group)
    return sorted(found)


def main():
    needs = read(sys.stdin)
    done = order(needs)
    print("\n".join(done) if len(done) == len(needs) else "cycle: " + " ".join(circles(needs)))


if __name__ == "__main__":
    main()
