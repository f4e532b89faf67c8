# To be read by other scripts (`. tools/pip-settings.sh`), which may set $python: gives uv what pip is told.
# uv does not read pip's settings. A machine whose pip is sent to a mirror, or trusts its own certificate, means uv too.

# `pip config get` overlooks PIP_CONFIG_FILE; the list has it, with PIP_* variables first.
pip_setting() {
    "${python:-python3}" -m pip config list 2>/dev/null | sed -n "s/^[a-z:]*\\.$1='\\(.*\\)'\$/\\1/p" | head -n 1
}

borrow_pip_settings() {
    if [ -z "${SSL_CERT_FILE:-}" ]; then
        cert=$(pip_setting cert)
        [ -z "$cert" ] || export SSL_CERT_FILE="$cert"
    fi
    if [ -z "${UV_DEFAULT_INDEX:-${UV_INDEX_URL:-}}" ]; then
        index=$(pip_setting index-url)
        [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    fi
}
