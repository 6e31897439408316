"""The files of deploy/ against each other: names, ports, paths and sizes that have to agree. Nothing is started."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dask.utils import parse_bytes
from manifests import KUBERNETES, OVERLAYS, build, documents, kustomization, pods
from packaging.requirements import Requirement

import daskrr
from daskrr.apps.cli import jobfile, main

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
TARGETS = ("docker", "kubernetes", "systemd", "cron")
FOLDERS = sorted(file.parent for file in KUBERNETES.rglob("kustomization.yaml"))


@pytest.mark.parametrize("target", TARGETS)
def test_readmes__have_one_shape(target: str) -> None:
    text = (DEPLOY / target / "README.md").read_text()
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections[:3] == ["Before you start", "Set up", "Run"]
    assert {"Watch", "Clean up", "What was run"} <= set(sections)
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert "://" in link or (DEPLOY / target / link).exists(), link


def job_files() -> dict[str, str]:
    found = {
        str(file.relative_to(DEPLOY)): file.read_text()
        for target in TARGETS
        for file in DEPLOY.glob(f"{target}/*.toml")
    }
    (config,) = documents(KUBERNETES / "base" / "job-file.yaml")
    return found | {"kubernetes": config["data"]["job.toml"]}


@pytest.mark.parametrize("name", job_files())
def test_job_files__have_no_mistakes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(job_files()[name])
    job = jobfile.read(path, main.commands)
    assert job.arguments["certify"]


def scheduler_address(name: str) -> str:
    (address,) = tomllib.loads(job_files()[name])["cluster"].values()
    return address


# Kubernetes


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kustomizations__name_exactly_the_files_there_are(folder: Path) -> None:
    said = kustomization(folder)
    named = said["resources"] + [patch["path"] for patch in said.get("patches", [])]
    files = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert sorted(name for name in named if name.endswith(".yaml")) == sorted(files)
    for name in named:
        assert name in files or (folder / name / "kustomization.yaml").exists(), name


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays__name_nothing_twice(overlay: str) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in build(KUBERNETES / "overlays" / overlay)]
    assert len(set(names)) == len(names)
    assert {one["metadata"].get("namespace", "daskrr") for one in build(KUBERNETES / "overlays" / overlay)} == {
        "daskrr"
    }


@pytest.mark.parametrize(
    ("target", "path", "complaint"),
    [("DaskClusters", "/spec/worker/replicas", "hits nothing"), ("DaskCluster", "/spec/worker/count", "is not there")],
)
def test_patches__that_miss_are_found(tmp_path: Path, target: str, path: str, complaint: str) -> None:
    said = {"namespace": "daskrr", "resources": ["cluster.yaml"], "patches": [{"path": "patch.yaml"}]}
    said["patches"][0]["target"] = {"kind": target, "name": "daskrr"}
    (tmp_path / "kustomization.yaml").write_text(yaml.dump(said))
    (tmp_path / "cluster.yaml").write_text((KUBERNETES / "overlays" / "cluster" / "cluster.yaml").read_text())
    (tmp_path / "patch.yaml").write_text(yaml.dump([{"op": "replace", "path": path, "value": 3}]))
    with pytest.raises(AssertionError, match=complaint):
        build(tmp_path)


def one_of(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in build(KUBERNETES / "overlays" / overlay) if one["kind"] == kind]
    return found


def test_patches__change_what_they_name() -> None:
    before, after = one_of("cluster", "DaskCluster"), one_of("nightly", "DaskCluster")
    assert (before["spec"]["worker"].pop("replicas"), after["spec"]["worker"].pop("replicas")) == (2, 4)
    assert before == after


def test_clusters__of_a_job_and_those_that_stay_are_the_same() -> None:
    job, stays = one_of("once", "DaskJob"), one_of("cluster", "DaskCluster")
    assert job["spec"]["cluster"]["spec"] == stays["spec"]
    assert job["metadata"]["name"] == stays["metadata"]["name"]


def test_clusters__are_where_the_job_file_looks_for_them() -> None:
    cluster = one_of("cluster", "DaskCluster")
    name, scheduler = cluster["metadata"]["name"], cluster["spec"]["scheduler"]
    (container,) = scheduler["spec"]["containers"]
    assert scheduler_address("kubernetes") == f"tcp://{name}-scheduler:{scheduler['service']['ports'][0]['port']}"
    assert [port["targetPort"] for port in scheduler["service"]["ports"]] == [
        port["name"] for port in container["ports"]
    ]
    assert scheduler["service"]["selector"]["dask.org/cluster-name"] == name
    for port, option in zip(container["ports"], ("--port=", "--dashboard-address=:"), strict=True):
        assert f"{option}{port['containerPort']}" in container["args"]


def test_network_policies__let_in_the_cluster_its_jobs_and_the_operator_alone() -> None:
    resources = build(KUBERNETES / "overlays" / "nightly")
    policies = {one["metadata"]["name"]: one["spec"] for one in resources if one["kind"] == "NetworkPolicy"}
    assert policies["daskrr-closed"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    cluster = {"dask.org/cluster-name": one_of("nightly", "DaskCluster")["metadata"]["name"]}
    job = one_of("nightly", "CronJob")["spec"]["jobTemplate"]["spec"]["template"]["metadata"]["labels"]
    assert policies["daskrr-cluster"]["podSelector"] == {"matchLabels": cluster}
    assert policies["daskrr-cluster"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": labels}} for labels in (cluster, job)]}
    ]
    assert policies["daskrr-operator"]["podSelector"]["matchLabels"] == cluster | {"dask.org/component": "scheduler"}
    assert len(policies) == 3


def test_gpus__are_those_of_the_workers_alone() -> None:
    cluster = one_of("gpu", "DaskCluster")["spec"]
    (worker,), (scheduler,) = (cluster[role]["spec"]["containers"] for role in ("worker", "scheduler"))
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in scheduler["resources"]["limits"]
    assert [one for one in worker["args"] if one.startswith("--memory-limit")] == ["--memory-limit=16GiB"]
    assert worker["image"] == scheduler["image"]


def test_batch_job_on_gpus__asks_for_them_and_is_a_command() -> None:
    script = (DEPLOY / "slurm" / "gpu.sh").read_text()
    assert subprocess.run(["bash", "-n", DEPLOY / "slurm" / "gpu.sh"], check=True).returncode == 0
    assert "#SBATCH --gres=gpu:" in script
    words = re.search(r"^exec daskrr run .*}\" (.*)$", script, re.MULTILINE)
    assert words is not None
    asked = main.commands["run"].make_context("run", ["job.toml", *words[1].split()], resilient_parsing=True).params
    assert (asked["cluster"], asked["device"]) == ("local", "cuda")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods__are_shut_in_and_find_what_they_name(overlay: str) -> None:
    resources = build(KUBERNETES / "overlays" / overlay)
    names = {(one["kind"], one["metadata"]["name"]) for one in resources}
    found = [pod for one in resources for pod in pods(one)]
    assert len(found) == {"cluster": 2, "gpu": 2, "once": 3, "nightly": 3}[overlay]
    for pod in found:
        (container,) = pod["containers"]
        kind = "-cuda" if overlay == "gpu" else ""
        assert container["image"] == f"registry.example/daskrr:{daskrr.__version__}{kind}"
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        assert ("ServiceAccount", pod["serviceAccountName"]) in names
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        for volume in volumes.values():
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in names


def test_workers__have_room_for_what_dask_lets_them_use() -> None:
    (container,) = one_of("cluster", "DaskCluster")["spec"]["worker"]["spec"]["containers"]
    (limit,) = [word.partition("=")[2] for word in container["args"] if word.startswith("--memory-limit=")]
    assert parse_bytes(limit) < parse_bytes(container["resources"]["limits"]["memory"] + "B")


def test_nightly__never_overlaps_and_always_ends() -> None:
    cron = one_of("nightly", "CronJob")["spec"]
    assert cron["concurrencyPolicy"] == "Forbid"
    assert cron["startingDeadlineSeconds"] < 86400
    assert cron["jobTemplate"]["spec"]["activeDeadlineSeconds"] < 86400
    (container,) = cron["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["daskrr", "run"]


# Containers


def compose() -> dict[str, Any]:
    (found,) = documents(DEPLOY / "docker" / "compose.yaml")
    return found["services"]


def test_compose__services_find_each_other() -> None:
    services = compose()
    assert scheduler_address("docker/job.toml") == "tcp://scheduler:8786"
    assert {"--port=8786", "--dashboard-address=:8787"} <= set(services["scheduler"]["command"])
    assert "tcp://scheduler:8786" in services["worker"]["command"]
    assert services["job"]["command"][:2] == ["daskrr", "run"]
    bucket = services["store"]["environment"]["BUCKET"]
    assert f"s3://{bucket}/" in job_files()["docker/job.toml"]


def test_compose__publishes_the_dashboard_to_this_machine_and_nothing_else() -> None:
    published = {name: service["ports"] for name, service in compose().items() if "ports" in service}
    assert published == {"scheduler": ["127.0.0.1:${DASHBOARD_PORT:-8787}:8787"]}
    for name, service in compose().items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name


def test_images__have_one_base() -> None:
    files = [DEPLOY / "docker" / "Dockerfile", DEPLOY / "docker" / "store" / "Dockerfile"]
    bases = [re.search(r"^ARG BASE=(\S+:\d+\.\d+\.\d+-\S+)$", file.read_text(), re.MULTILINE) for file in files]
    assert len({base and base[1] for base in bases}) == 1
    assert None not in bases


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_requirements__pin_what_the_image_needs(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    lines = (DEPLOY / "docker" / "requirements.txt").read_text().splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = {one.name: one for one in listed if one.marker is None or one.marker.evaluate(environment)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["s3"]:
        wanted = Requirement(text)
        (pin,) = pins[wanted.name].specifier
        assert pin.operator == "=="
        assert pin.version in wanted.specifier, text


# Timers


def test_timers__run_the_same_job_in_the_same_environment() -> None:
    for name in ("job.toml", "daskrr.env"):
        assert (DEPLOY / "cron" / name).read_text() == (DEPLOY / "systemd" / name).read_text()
    command = "daskrr run --quiet /etc/daskrr/job.toml"
    assert command in (DEPLOY / "cron" / "daskrr").read_text()
    assert command in (DEPLOY / "systemd" / "daskrr.service").read_text()


def test_environment_files__hold_no_secrets() -> None:
    lines = (DEPLOY / "cron" / "daskrr.env").read_text().splitlines()
    assert all(line.startswith("#") for line in lines)
    assert not any(re.search(r"(KEY|KEY_ID)=.", line) for line in lines)
