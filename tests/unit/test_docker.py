"""What the `docker` environment decides without an engine."""

import subprocess
import sys
from dataclasses import replace

import pytest

from dockyard.process import Output
from dockyard.rollout.docker.docker_cli import State
from dockyard.rollout.docker.environment import Overlay
from dockyard.rollout.docker.guard import FILES, PATH, TOOLS, parents, read_script
from dockyard.rollout.docker.site import Leftovers, Owner


def test_an_owner_survives_its_label():
    owner = Owner.current()
    assert Owner.parse(owner.label) == owner


@pytest.mark.parametrize("label", ["", "x", "a|b|c|d", "a|b|c|not-a-number|e", "a|b|c|1|e|f"])
def test_a_label_that_we_did_not_write_has_no_owner(label: str):
    assert Owner.parse(label) is None


def test_this_process_is_not_gone():
    assert not Owner.current().is_gone()


def test_a_process_that_ended_is_gone():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = Owner.of(child.pid)
        assert not owner.is_gone()
        child.kill()
        child.wait()
        assert owner.is_gone()


@pytest.mark.parametrize(
    ("changed", "is_gone"),
    [
        ({"started": "1"}, True),  # another process has the number now
        ({"boot": "earlier"}, True),
        ({"boot": "earlier", "namespace": "2"}, True),
        ({"namespace": "2"}, False),  # numbers of another container mean nothing here
        ({"host": "another"}, False),
        ({"host": "another", "boot": "earlier"}, False),
    ],
)
def test_only_what_is_certain_counts_as_gone(changed: dict[str, str], is_gone: bool):
    assert replace(Owner.current(), **changed).is_gone() is is_gone


def test_the_table_of_what_tests_rely_on_is_words_for_a_shell():
    for word in (*PATH, *TOOLS, *FILES):
        assert not set(word) & set(" '\"\n\\$`"), word
    assert all(path.startswith("/") for path in (*PATH, *FILES))
    assert not [name for name in TOOLS if "/" in name]
    assert {"sh", "bash", "env", "cat", "python3"} <= set(TOOLS)
    assert len(set(FILES)) == len(FILES)


def test_the_guards_script_holds_the_images_own_path_and_is_a_script():
    state = State(
        image="i",
        is_running=True,
        is_paused=False,
        was_out_of_memory=False,
        exit_code=0,
        env={"PATH": "/opt/env/bin:/usr/bin:relative:/o dd:/gl*b", "BASH_ENV": "/etc/start"},
        programs=("/entry.sh", "start-it", "it's"),
    )
    script = read_script(state, ["/tests"])
    assert "folders='/opt/env/bin\n/usr/bin\n/usr/local/sbin\n" in script
    assert "/etc/start\n/entry.sh'" in script
    assert "\nstart-it'" in script
    assert "it's" not in script
    assert "/o dd" not in script
    assert "/gl*b" not in script
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)


def test_every_folder_on_the_way_to_a_file_may_have_become_a_link():
    assert parents("/usr/lib/x*/file") == ["/usr", "/usr/lib", "/usr/lib/x*", "/usr/lib/x*/file"]


def test_a_task_with_a_compose_file_keeps_its_image_command_and_networks():
    compose = Overlay(labels={"a": "b"}, image=None, network="ours", max_processes=9).compose()
    assert set(compose) == {"services"}
    assert set(compose["services"]["main"]) == {"labels", "stop_grace_period", "volumes"}


@pytest.mark.parametrize(
    ("network", "mode", "networks"),
    [
        (None, None, None),
        ("none", "none", None),
        ("ours", None, {"default": {"name": "ours", "external": True}}),
    ],
)
def test_the_network_of_a_plain_task_is_the_runs(network: str | None, mode: str | None, networks: object):
    compose = Overlay(labels={}, image="i", network=network, max_processes=9).compose()
    assert compose["services"]["main"].get("network_mode") == mode
    assert compose.get("networks") == networks


def test_what_the_janitor_removed_fits_into_a_line():
    assert str(Leftovers(containers=("a", "b"), networks=("c",))) == "2 containers, 1 network"
    assert not Leftovers()


def test_output_keeps_its_beginning_and_its_end():
    output = Output(keep_bytes=4)
    for byte in b"0123456789":
        output.write(bytes([byte]))
    assert output.text() == "0123\n[2 bytes left out]\n6789"
