#!/bin/sh
# Prints files of the same content, in groups: duplicates.sh DIR
export LC_ALL=C
[ -d "$1" ] || exit 2
cd -- "$1" || exit 2
# Read from stdin, so that sha256sum has no name to escape: a hash, then the path.
find . -type f -size +0 -exec sh -c '
    for path do printf "%s %s\n" "$(sha256sum <"$path" | cut -c 1-64)" "${path#./}"; done
' sh {} + | sort | awk '
    { hash = substr($0, 1, 64); path = substr($0, 66) }
    hash != last { first = path; last = hash; count = 0 }
    { count++; paths[hash, count] = path; firsts[hash] = first; counts[hash] = count }
    END { for (hash in counts) if (counts[hash] > 1) for (i = 1; i <= counts[hash]; i++) print firsts[hash] "\001" paths[hash, i] }
' | sort | awk '
    { cut = index($0, "\001"); first = substr($0, 1, cut - 1); path = substr($0, cut + 1) }
    NR == 1 || first != last { number++; last = first }
    { print number " " path }
'
exit 0
