"""The manifest for KubeRay fits the image, the command line, and itself."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.packaging.written import ROOT, instructions_of, parameters_of, settings_of, stages_of

MANIFEST = [
    part for part in yaml.safe_load_all((ROOT / "packaging" / "kuberay.yaml").read_text()) if part
]
INSTRUCTIONS = instructions_of((ROOT / "packaging" / "Dockerfile").read_text())
GUIDE = (ROOT / "docs" / "cluster.md").read_text()


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [part for part in MANIFEST if part["kind"] == kind]
    return dict(found)


CLUSTER, FRONT = of_kind("RayCluster")["spec"], of_kind("Deployment")["spec"]["template"]


def groups() -> Iterator[dict[str, Any]]:
    yield CLUSTER["headGroupSpec"]
    yield from CLUSTER["workerGroupSpecs"]


def containers() -> Iterator[dict[str, Any]]:
    for group in groups():
        yield from group["template"]["spec"]["containers"]
    yield from FRONT["spec"]["containers"]


def front() -> dict[str, Any]:
    [found] = FRONT["spec"]["containers"]
    return dict(found)


def served() -> dict[str, Any]:
    return dict(parameters_of(front()["args"]))


def test_rays_version_is_the_images() -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert CLUSTER["rayVersion"] == pinned.group(1)


def test_all_run_the_image_that_the_guide_builds() -> None:
    [built] = re.findall(r"--build-arg KVELL_EXTRAS=\[ray\] --tag (\S+)", GUIDE)
    assert {one["image"] for one in containers()} == {built}
    build, _ = stages_of(INSTRUCTIONS)
    assert [item.text for item in build if item.word == "ARG" and "EXTRAS" in item.text] == [
        "KVELL_EXTRAS="
    ]
    assert any("${KVELL_EXTRAS}" in item.text for item in build if item.word == "RUN")


def test_the_front_is_started_with_flags_of_serve() -> None:
    taken = served()
    assert taken["host"] == "0.0.0.0"
    assert taken["instances"] == "prefill=1,decode=2"
    [port] = [one["containerPort"] for one in front()["ports"]]
    assert taken["port"] == port
    [service] = of_kind("Service")["spec"]["ports"]
    assert service["port"] == port


def test_fronts_reach_the_head() -> None:
    taken = served()
    ports = [
        one["containerPort"]
        for container in CLUSTER["headGroupSpec"]["template"]["spec"]["containers"]
        for one in container["ports"]
    ]
    name, _, port = str(taken["cluster"]).removeprefix("ray://").partition(":")
    assert name == f"{of_kind('RayCluster')['metadata']['name']}-head-svc"
    assert int(port) in ports


def test_fronts_are_several_and_start_the_same_instances() -> None:
    assert of_kind("Deployment")["spec"]["replicas"] > 1
    assert served()["cluster_name"] == "kvell"


def test_keys_are_mounted_from_the_secret_that_the_guide_makes() -> None:
    [keys] = [one for one in FRONT["spec"]["volumes"] if "secret" in one]
    assert f"create secret generic {keys['secret']['secretName']} --from-file=keys.toml" in GUIDE
    [mount] = [one for one in front()["volumeMounts"] if one["name"] == keys["name"]]
    assert mount["readOnly"]
    assert str(served()["api_key_file"]) == f"{mount['mountPath']}/keys.toml"


def test_there_is_room_for_the_instances_of_a_machine_that_dies() -> None:
    counts = re.findall(r"=(\d+)", str(served()["instances"]))
    wanted = sum(map(int, counts))
    [machines] = CLUSTER["workerGroupSpecs"]
    assert machines["replicas"] > wanted
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_nobody_else_reaches_ray() -> None:
    policy = of_kind("NetworkPolicy")["spec"]
    labels = [group["template"]["metadata"]["labels"] for group in groups()]
    assert all(one == policy["podSelector"]["matchLabels"] for one in labels)
    [rule] = policy["ingress"]
    let_in = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert labels[0] in let_in and FRONT["metadata"]["labels"] in let_in
    assert policy["policyTypes"] == ["Ingress"]


def test_it_waits_as_long_as_systemd_does() -> None:
    unit = settings_of((ROOT / "packaging" / "kvell.service").read_text())
    assert [str(FRONT["spec"]["terminationGracePeriodSeconds"])] == unit["TimeoutStopSec"]


@pytest.mark.parametrize("container", list(containers()), ids=lambda one: str(one["name"]))
def test_python_is_where_the_image_has_it(container: dict[str, Any]) -> None:
    """Whoever starts a shell names the folder; the front is started by the image itself."""
    [path] = [item.text for item in INSTRUCTIONS if item.word == "ENV" and "PATH=" in item.text]
    folder = path.partition("PATH=")[2].partition(":")[0]
    if "command" in container:
        assert f"PATH={folder}:" in container["args"][0]
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    else:
        assert container["args"][0] == "serve"
    assert container["resources"]["limits"]["memory"]
