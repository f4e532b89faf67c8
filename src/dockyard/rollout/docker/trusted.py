"""What tests rely on besides their own files. Before grading it is as in the task's image again.

A name of TOOLS that the image has in some folder of PATH is restored there, and copies that the agent put into other
folders of PATH go. A name that the image lacks is left: the task may have been to install it. FILES are patterns: what
the image has is restored, what it lacks is removed. A task whose honest solution changes these is for the seal
`processes`; one that must not trust packages either for `strict`, or for a separate verifier.
"""

from dockyard.rollout.verifier import ABOVE_TESTS

PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
"""Besides the folders of the image's own PATH."""

_SHELLS = "sh bash dash ash busybox env su sudo"
_COREUTILS = (
    "[ arch b2sum base32 base64 basename cat chgrp chmod chown chroot cksum comm cp csplit cut date dd df dir dirname "
    "du echo expand expr factor false fmt fold head hostid id install join link ln logname ls md5sum mkdir mkfifo "
    "mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf pwd readlink realpath rm rmdir "
    "seq sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac "
    "tail tee test timeout touch tr true truncate tsort tty uname unexpand uniq unlink users vdir wc who whoami yes"
)
_TEXT = "grep egrep fgrep sed awk gawk mawk find xargs diff cmp tar gzip gunzip zcat jq which"
_PROCESSES = "kill ps pgrep pkill top pidof setsid"
_LANGUAGES = "python python3 python3.[0-9]* pip pip3 pytest perl node npm npx uv uvx"
_FETCHING = "curl wget git apt apt-get dpkg apk dnf yum"
TOOLS = tuple(f"{_SHELLS} {_COREUTILS} {_TEXT} {_PROCESSES} {_LANGUAGES} {_FETCHING}".split())

_LOADER = tuple(
    f"{folder}/{name}"
    for folder in ("/lib", "/lib64", "/lib/*-linux-gnu", "/usr/lib", "/usr/lib64", "/usr/lib/*-linux-gnu")
    for name in (
        "ld-*.so*",
        "libc.so*",
        "libdl.so.*",
        "libm.so.*",
        "libpthread.so.*",
        "libtinfo.so.*",
        "libselinux.so.*",
    )
)
_SYSTEM = (
    "/etc/bash.bashrc",
    "/etc/bashrc",
    "/etc/environment",
    "/etc/ld.so.preload",
    "/etc/pip.conf",
    "/etc/profile",
    "/etc/profile.d/*",
)
_HOME = tuple(
    f"{home}/{name}"
    for home in ("/root", "/home/*")
    for name in (
        ".bash_login",
        ".bash_profile",
        ".bashrc",
        ".config/pip/pip.conf",
        ".config/uv/uv.toml",
        ".curlrc",
        ".local/bin/env",
        ".local/lib/python3*/site-packages/sitecustomize.py",
        ".local/lib/python3*/site-packages/usercustomize.py",
        ".pip/pip.conf",
        ".profile",
        ".wgetrc",
    )
)
_PYTHON = tuple(
    f"{root}/python3*/{folder}{name}.py"
    for root in ("/usr/lib", "/usr/local/lib")
    for folder in ("", "dist-packages/", "site-packages/")
    for name in ("sitecustomize", "usercustomize")
)
FILES = (*_SYSTEM, *_HOME, *_PYTHON, *_LOADER, *ABOVE_TESTS)
MORE_FILES = (
    "/etc/apt/apt.conf",
    "/etc/apt/apt.conf.d/*",
    "/etc/gitconfig",
    "/etc/npmrc",
    "/etc/uv/uv.toml",
    "/root/.gitconfig",
    "/root/.config/git/config",
    "/root/.npmrc",
    "/home/*/.gitconfig",
    "/home/*/.npmrc",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d/*",
    "/root/.local/lib/python3*/site-packages/*.pth",
    "/home/*/.local/lib/python3*/site-packages/*.pth",
    *(
        f"{root}/python3*/{folder}*.pth"
        for root in ("/usr/lib", "/usr/local/lib")
        for folder in ("", "dist-packages/", "site-packages/")
    ),
)
"""Only by `strict`, together with every library and module that the agent changed, and with every name of TOOLS that
the image lacks: honest work changes these too, by `pip install`, `git config`, or `make install` and `ldconfig`."""
